"""Milliseconds a token at each batch size: `tritonllm bench latency MODEL`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tritonllm.bench.limits import fraction
from tritonllm.bench.step_profile import profile_steps
from tritonllm.bench.timing import Bench, rounded
from tritonllm.errors import EngineError
from tritonllm.sampling_params import SamplingParams


def measure(
    bench: Bench,
    batches: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
    runs: int,
    profile: bool,
    sampling: SamplingParams | None = None,
) -> dict[str, Any]:
    """Time batches of random prompts with the end of text ignored, greedy or with other `sampling`.

    A step's time is that of `output_tokens` tokens less that of one token, over the steps between: the prompts and what
    a call costs cancel out. The median of the runs is reported; `output_tokens_per_second` includes the prompts.
    """
    if sampling is not None:
        bench.sampling = sampling
    chosen = bench.sampling
    return {
        "start_seconds": round(bench.start_seconds, 2),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "temperature": chosen.temperature,
        "top_p": chosen.top_p,
        "repetition_penalty": chosen.repetition_penalty,
        "regex": chosen.structured_outputs and chosen.structured_outputs.regex,
        "batches": [_batch(bench, batch, prompt_tokens, output_tokens, runs, profile) for batch in batches],
    }


def _batch(
    bench: Bench, batch: int, prompt_tokens: int, output_tokens: int, runs: int, profile: bool
) -> dict[str, Any]:
    bench.timed(bench.prompts(batch, prompt_tokens), 2)  # the first call of a size is slower
    prefill_steps = -(-batch * prompt_tokens // bench.llm.config.max_num_batched_tokens)
    measured = []
    for _ in range(runs):
        one = bench.timed(bench.prompts(batch, prompt_tokens), 1)
        before = bench.llm.stats()["steps"]
        all_tokens = bench.timed(bench.prompts(batch, prompt_tokens), output_tokens)
        _check_together(bench, batch, bench.llm.stats()["steps"] - before, 2 * prefill_steps + output_tokens)
        step = (all_tokens - one) / (output_tokens - 1)
        measured.append({"seconds": all_tokens, "seconds_of_one_token": one, "ms_per_token": 1e3 * step})
    step_ms = statistics.median(run["ms_per_token"] for run in measured)
    seconds = statistics.median(run["seconds"] for run in measured)
    floor = bench.limits.decoding_seconds(batch, prompt_tokens, output_tokens)
    row: dict[str, Any] = {
        "batch": batch,
        "ms_per_token": round(step_ms, 4),
        "floor_ms": rounded(None if floor is None else 1e3 * floor, 4),
        "fraction": rounded(fraction(floor, step_ms / 1e3), 3),
        "decode_tokens_per_second": round(1e3 * batch / step_ms, 1) if step_ms > 0 else None,
        "output_tokens_per_second": round(batch * output_tokens / seconds, 1),
        "runs": [{key: round(value, 6) for key, value in run.items()} for run in measured],
    }
    if profile:
        row["profile"] = profile_steps(bench, batch, prompt_tokens, output_tokens)
    return row


def _check_together(bench: Bench, batch: int, steps: int, most_steps: int) -> None:
    """A batch that ran as several small ones would give a number that means nothing."""
    if steps > most_steps:
        raise EngineError(
            f"a batch of {batch} took {steps} steps, since the KV cache of {bench.llm.stats()['total_blocks']} blocks "
            "cannot hold all of it and a block to spare for each: lower --batches, --output-tokens or --block-size."
        )
