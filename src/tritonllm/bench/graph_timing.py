"""What benchmarks of kernels share: the time of a CUDA graph, and what an H200's memory allows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

PEAK = 4.4e6
"""Bytes in a microsecond: what an H200 reads at best."""

ROTATED_BYTES = 400 << 20
"""What a chain of calls reads in turn, many times the L2 cache, so that nothing is there from the replay before."""

_REPLAYS = 12


def graph_microseconds(run: Callable[[], object]) -> float:
    """Median time of a CUDA graph that holds everything `run` launches."""
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def chain_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Time of one of several calls, launched one after the other in a graph."""

    def run() -> None:
        for call in calls:
            call()

    return graph_microseconds(run) / len(calls)
