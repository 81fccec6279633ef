"""A small soak in every run; `make soak` is the long one, of which `--slow` runs as much in four pieces."""

from __future__ import annotations

import pytest
from scheduler_soak import run


@pytest.mark.parametrize(
    ("num_requests", "seed"), [(600, 7), *(pytest.param(5_000, seed, marks=pytest.mark.slow) for seed in range(4))]
)
def test_random_requests_keep_every_invariant_and_leave_the_pool_full(num_requests: int, seed: int) -> None:
    counts = run(num_requests, seed=seed)
    assert counts["requests"] == num_requests
    finished = sum(count for name, count in counts.items() if name.startswith("finished: "))
    assert finished == num_requests - counts["refused"] + counts["further samples"]
    for kind in (
        "further samples",
        "preemptions",
        "cached tokens",
        "partial chunks",
        "mixed steps",
        "NaN",
        "aborted while waiting",
        "aborted while prefilling",
        "aborted while running",
        "finished: stop",
        "finished: length",
    ):
        assert counts[kind] > 0, f"the soak never saw: {kind}"
