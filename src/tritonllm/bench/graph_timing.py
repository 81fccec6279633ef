"""What benchmarks of kernels share: the time of a CUDA graph, and what an H200's memory allows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

PEAK = 4.4e6
"""Bytes in a microsecond: what an H200 reads at best."""

ROTATED_BYTES = 400 << 20
"""What a chain of calls reads in turn, many times the L2 cache, so that nothing is there from the replay before."""

_REPLAYS = 12
_SHORT_CHAIN = 1000.0  # microseconds: what a graph takes to start is next to nothing of that


def graph_microseconds(run: Callable[[], object]) -> float:
    """Median time of a CUDA graph that holds everything `run` launches."""
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(_REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # keeps the device busy while the host queues the one that counts
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def chain_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Time of one of several calls, launched one after the other in a graph; a short chain is repeated in it."""

    def run(times: int) -> None:
        for _ in range(times):
            for call in calls:
                call()

    times, taken = 1, graph_microseconds(partial(run, 1))
    if taken < _SHORT_CHAIN:
        times = math.ceil(_SHORT_CHAIN / taken)
        taken = graph_microseconds(partial(run, times))
    return taken / times / len(calls)
