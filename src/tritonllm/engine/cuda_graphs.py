"""Decode steps of fixed sizes, captured once and replayed; where there is no GPU, or on request, called each time.

The captured callable reads and writes static buffers alone, so nothing is copied in or out, and the eager path is the
very same callable on the very same padded batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tritonllm.engine.device_steps import PARTS, Part, parts_of
from tritonllm.engine.sequence import Choice

DecodeForward = Callable[[int, Part], None]
"""`forward(num_rows, part)`: one decode step of the first rows, or a half of it."""


def bucket_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, multiples of 16, and the limit itself always."""
    sizes = [size for size in (1, 2, 4, 8, *range(16, max_rows, 16)) if size < max_rows]
    return [*sizes, max_rows]


def capture(call: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Capture a call that touches static buffers alone; it runs once before, which compiles what it needs.

    Args:
        pool: memory to share with graphs that never run at the same time, None for memory of its own.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        call()
    return graph


class DecodeGraphs:
    """Runs the decode step of `n` rows in the smallest bucket that holds them.

    Args:
        forward: the step.
        max_rows: largest batch.
    """

    def __init__(self, forward: DecodeForward, max_rows: int) -> None:
        self.forward = forward
        self.buckets = bucket_sizes(max_rows)
        self._graphs: dict[tuple[int, Part], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # torch's handle of the memory that all graphs share

    def bucket(self, num_rows: int) -> int:
        """Smallest captured size that is at least `num_rows`."""
        return self.buckets[bisect_left(self.buckets, num_rows)]

    def capture(self, buckets: list[int] | None = None) -> None:
        """Capture every part of every bucket, largest first so that the others reuse its memory.

        Every row must be padding. Each size runs once before its capture, which compiles what it needs.
        """
        for size in sorted(buckets if buckets is not None else self.buckets, reverse=True):
            for part in PARTS:
                graph = capture(partial(self.forward, size, part), self._pool)
                self._pool = self._pool or graph.pool()
                self._graphs[size, part] = graph

    def run(self, num_rows: int, choice: Choice) -> None:
        """Decode the first `num_rows` rows; rows up to the bucket's size must be padding."""
        for part in parts_of(choice):
            self.run_part(num_rows, part)

    def run_part(self, num_rows: int, part: Part) -> None:
        """Run one part of that."""
        size = self.bucket(num_rows)
        graph = self._graphs.get((size, part))
        if graph is None:
            self.forward(size, part)
        else:
            graph.replay()

    def reset(self) -> None:
        """Drop every graph and the memory behind them."""
        self._graphs.clear()
        self._pool = None
