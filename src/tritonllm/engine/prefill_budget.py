"""How many prompt tokens a step takes: few beside sequences that decode, lest a long prompt stop their streams."""

from __future__ import annotations


def prefill_budget(budget: int, num_decoding: int, num_prompts: int, limit: int | None) -> int:
    """Prompt tokens of the next step.

    Every token of a decoding sequence comes at the end of a step, so what a step computes beside it is the gap that its
    reader sees. One prompt adds `limit` tokens to it. Of many prompts each adds as much, up to the budget: then more
    requests wait for their first token than would gain from short steps, and a flood is computed as fast as ever.

    Args:
        budget: most tokens of a step, decoding sequences included.
        num_decoding: sequences that decode in it.
        num_prompts: prompts that wait and could be admitted, or are under way.
        limit: prompt tokens for each of these while sequences decode; None for no limit.
    """
    left = budget - num_decoding
    return left if limit is None or not num_decoding else min(left, limit * num_prompts)
