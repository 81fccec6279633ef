"""Milliseconds to the first token of one prompt: `tritonllm bench ttft MODEL`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tritonllm.bench.limits import fraction
from tritonllm.bench.timing import Bench, rounded


def measure(bench: Bench, lengths: Sequence[int], runs: int) -> dict[str, Any]:
    """Time `generate` with one output token for prompts of each length, after one call that is not counted."""
    return {
        "start_seconds": round(bench.start_seconds, 2),
        "lengths": [_length(bench, length, runs) for length in lengths],
    }


def _length(bench: Bench, length: int, runs: int) -> dict[str, Any]:
    bench.timed(bench.prompts(1, length), 1)
    measured = [bench.timed(bench.prompts(1, length), 1) for _ in range(runs)]
    seconds = statistics.median(measured)
    floor = bench.limits.prefill_seconds(length)
    return {
        "prompt_tokens": length,
        "ms": round(1e3 * seconds, 3),
        "floor_ms": rounded(None if floor is None else 1e3 * floor, 3),
        "fraction": rounded(fraction(floor, seconds), 3),
        "prompt_tokens_per_second": round(length / seconds, 1),
        "runs": [round(1e3 * run, 3) for run in measured],
    }
