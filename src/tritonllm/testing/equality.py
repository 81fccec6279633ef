"""Many ways to compute the same greedy tokens: each must give what a prompt gives alone in a fresh engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tritonllm.engine.llm_engine import LLMEngine
from tritonllm.sampling_params import SamplingParams

Tokens = list[int]
Way = Callable[[str, list[Tokens], int, dict[str, Any]], list[Tokens]]
"""`way(name_or_path, prompts, num_tokens, engine_keys)`: the completion of each prompt."""

BLOCK_SIZE = 16


def assert_ways_agree(
    name_or_path: str, prompts: list[Tokens], num_tokens: int = 24, ways: list[str] | None = None, **engine_keys: Any
) -> None:
    """Complete prompts greedily in every way of `WAYS` and compare with each prompt alone in a fresh engine.

    Args:
        name_or_path: the checkpoint.
        prompts: token ids; some should share more than a block of 16, and fill more than the pool of one request.
        num_tokens: tokens to generate for each.
        ways: names of `WAYS`; None is all of them.
        engine_keys: further configuration, such as `device`.

    Raises:
        AssertionError: a way gives other tokens, or does not do what its name says; names way, prompt and token.
    """
    keys = {"dtype": "float32", **engine_keys}
    expected = complete_alone(name_or_path, prompts, num_tokens, keys)
    for name in ways if ways is not None else WAYS:
        found = WAYS[name](name_or_path, prompts, num_tokens, keys)
        for index, (ours, alone) in enumerate(zip(found, expected, strict=True)):
            if ours != alone:
                step = next((i for i, (a, b) in enumerate(zip(ours, alone, strict=False)) if a != b), len(ours))
                raise AssertionError(
                    f"{name}: prompt {index} of {len(prompts[index])} tokens differs from token {step} on: "
                    f"{ours[step : step + 8]}, alone in a fresh engine {alone[step : step + 8]}"
                )


def complete_alone(name_or_path: str, prompts: list[Tokens], num_tokens: int, keys: dict[str, Any]) -> list[Tokens]:
    """Each prompt in an engine that nobody has used before, without graphs, in one chunk."""
    completions = []
    for prompt in prompts:
        with _engine(name_or_path, [prompt], num_tokens, keys, enforce_eager=True) as engine:
            completions += _generate(engine, [prompt], num_tokens)
    return completions


def _batched(name_or_path: str, prompts: list[Tokens], num_tokens: int, keys: dict[str, Any]) -> list[Tokens]:
    with _engine(name_or_path, prompts, num_tokens, keys) as engine:
        return _generate(engine, prompts, num_tokens)


def _eager(name_or_path: str, prompts: list[Tokens], num_tokens: int, keys: dict[str, Any]) -> list[Tokens]:
    with _engine(name_or_path, prompts, num_tokens, keys, enforce_eager=True) as engine:
        return _generate(engine, prompts, num_tokens)


def _chunked(size: int) -> Way:
    def way(name_or_path: str, prompts: list[Tokens], num_tokens: int, keys: dict[str, Any]) -> list[Tokens]:
        with _engine(name_or_path, prompts, num_tokens, keys, max_num_batched_tokens=size) as engine:
            return _generate(engine, prompts, num_tokens)

    return way


def _one_after_another(name_or_path: str, prompts: list[Tokens], num_tokens: int, keys: dict[str, Any]) -> list[Tokens]:
    with _engine(name_or_path, prompts, num_tokens, keys) as engine:
        return [tokens for prompt in prompts for tokens in _generate(engine, [prompt], num_tokens)]


def _cached(name_or_path: str, prompts: list[Tokens], num_tokens: int, keys: dict[str, Any]) -> list[Tokens]:
    with _engine(name_or_path, prompts, num_tokens, keys) as engine:
        engine.generate(prompts, _greedy(num_tokens))
        again = engine.generate(prompts, _greedy(num_tokens))
    hits = sum(usage["cached_tokens"] for usage in again["usage"])
    if not hits and any(len(prompt) > BLOCK_SIZE for prompt in prompts):
        raise AssertionError("prefix cache: the same prompts sent again found nothing in the cache")
    return again["token_ids"]


def _preempted(name_or_path: str, prompts: list[Tokens], num_tokens: int, keys: dict[str, Any]) -> list[Tokens]:
    longest = max(map(len, prompts)) + num_tokens
    blocks = -(-longest // BLOCK_SIZE) + 1
    with _engine(name_or_path, prompts, num_tokens, keys, max_cached_blocks=blocks) as engine:
        completions = _generate(engine, prompts, num_tokens)
        if not engine.stats()["preemptions"]:
            raise AssertionError(f"preempted: a pool of {blocks} blocks preempted nobody; give more or longer prompts")
    return completions


WAYS: dict[str, Way] = {
    "all in one batch": _batched,
    "all in one batch, eager": _eager,
    "one after another in one engine": _one_after_another,
    "chunks of 1": _chunked(1),
    "chunks of 7": _chunked(7),
    "chunks of 64": _chunked(64),
    "prefix cache": _cached,
    "preempted": _preempted,
}
"""Name to function."""


def _engine(
    name_or_path: str, prompts: list[Tokens], num_tokens: int, keys: dict[str, Any], **changes: Any
) -> LLMEngine:
    """An engine with room for all prompts at once, unless `changes` say otherwise."""
    lengths = [len(prompt) + num_tokens for prompt in prompts]
    sized = {
        "block_size": BLOCK_SIZE,
        "max_num_sequences": len(prompts),
        "max_model_length": max(lengths),
        "max_num_batched_tokens": sum(lengths),
        "max_cached_blocks": sum(-(-length // BLOCK_SIZE) for length in lengths) + len(prompts),
    }
    return LLMEngine({"model_name_or_path": name_or_path, **sized, **keys, **changes})


def _generate(engine: LLMEngine, prompts: list[Tokens], num_tokens: int) -> list[Tokens]:
    return engine.generate(prompts, _greedy(num_tokens))["token_ids"]


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
