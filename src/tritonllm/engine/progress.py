"""A progress bar for `LLMEngine.generate`."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tritonllm.engine.completion import Completion


def show_progress(steps: Iterable[tuple[int, bool]], completions: list[Completion]) -> None:
    """Run through the steps, counting finished requests in a bar on standard error.

    Beside it stand tokens per second, averages since the start, of steps that held prompt tokens and of those that only
    decoded.

    Args:
        steps: tokens of each step, and whether it held prompt tokens.
        completions: the requests to count.
    """
    from tqdm.auto import tqdm

    tokens = {"prefill": 0, "decode": 0}
    seconds = {"prefill": 0.0, "decode": 0.0}
    with tqdm(total=len(completions), desc="generate", unit=" requests", dynamic_ncols=True) as bar:
        before = time.perf_counter()
        for num_tokens, is_prefill in steps:
            now = time.perf_counter()
            kind = "prefill" if is_prefill else "decode"
            tokens[kind] += num_tokens
            seconds[kind] += now - before
            before = now
            rates = {name: f"{count / seconds[name]:,.0f} tokens/s" for name, count in tokens.items() if count}
            bar.set_postfix(rates, refresh=False)
            bar.update(sum(completion.seq.is_finished for completion in completions) - bar.n)
