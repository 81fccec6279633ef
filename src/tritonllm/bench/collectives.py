"""All-reduces between GPUs, NCCL's and ours: `python -m tritonllm.bench.collectives [--ranks 2] [--json FILE]`.

It starts its ranks by itself, one a GPU. Each size is compared with a sum in fp32, then timed: calls one after the
other in a CUDA graph, median of its replays. Columns with "+norm" include the add and the RMSNorm that follow: a kernel
of its own after NCCL, in the same kernel otherwise. The last column is what `all_reduce="auto"` takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tritonllm.bench.tuning_options import read_numbers
from tritonllm.engine.cuda_graphs import capture
from tritonllm.errors import EngineError, KernelError
from tritonllm.kernels.norm import add_rms_norm
from tritonllm.kernels.peer_all_reduce import (
    Norm,
    choose_plan,
    one_shot_fits,
    plan_one_shot,
    plan_two_shot,
    two_shot_fits,
)
from tritonllm.models.collectives import DistributedGroup

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HIDDEN = (4096, 8192)
_CALLS = 20  # in a graph
_REPLAYS = 20
_PLANS = {"one_shot": (plan_one_shot, one_shot_fits), "two_shot": (plan_two_shot, two_shot_fits)}


def run_on_ranks(size: int, function: Callable[..., Any], *args: Any, seconds: float = 300) -> Any:
    """`function(group, *args)` in a process for each of `size` GPUs; what rank 0 returned.

    Args:
        size: number of ranks.
        function: of a module, as it is sent to other processes.
        args: are sent as well.
        seconds: after which the ranks are ended.

    Raises:
        EngineError: they took longer.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = multiprocessing.get_context("spawn").SimpleQueue()
    ranks = multiprocessing.spawn(
        _rank_main, (size, store.port, function, args, results), nprocs=size, join=False, daemon=True
    )
    deadline = time.monotonic() + seconds
    result, ended = None, False
    try:
        while not ended:
            if time.monotonic() > deadline:
                raise EngineError(f"the ranks had {seconds:.0f} seconds and are not done: one waits for another")
            ended = ranks.join(timeout=0.2)
            if not results.empty():
                result = results.get()
    finally:
        for process in ranks.processes:
            process.kill()
    return result


def _rank_main(rank: int, size: int, port: int, function: Callable[..., Any], args: Any, results: Any) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = DistributedGroup.connect(rank, size, dist.TCPStore("127.0.0.1", port, is_master=False), device)
    result = function(group, *args)
    torch.cuda.synchronize()
    group.close()
    if rank == 0:
        results.put(result)


def microseconds(run: Callable[[], object]) -> float:
    """Median time of a call among many in a graph; every rank measures at once."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()

    def chain() -> None:
        for _ in range(_CALLS):
            run()

    graph = capture(chain, None)
    times = []
    for _ in range(_REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / _CALLS)
    return statistics.median(times[2:])


def measure(group: DistributedGroup, rows: int, hidden: int) -> dict[str, Any]:
    """The line of one size in bfloat16, in microseconds; None for what does not take it.

    Raises:
        KernelError: a sum is wrong.
    """
    if group.peers is None:
        raise EngineError(
            "the GPUs do not reach each other's memory over NVLink: there is nothing to compare with NCCL"
        )
    buffer = group.peers.buffer
    nccl = replace(group, peers=None)
    generator = torch.Generator(group.device).manual_seed(group.rank)
    x = torch.randn(rows, hidden, generator=generator, device=group.device).bfloat16()
    residual, weight = torch.zeros_like(x), torch.ones(hidden, dtype=x.dtype, device=group.device)
    line: dict[str, Any] = {"rows": rows, "hidden": hidden, "bytes": x.nbytes}
    expected = nccl.all_reduce(x.float())
    for name, (plan, fits) in _PLANS.items():
        if not fits(rows, hidden, x.dtype, buffer):
            line |= {name: None, f"{name}_norm": None}
            continue
        out = torch.empty_like(x)
        plan(x, out, None, buffer).run()
        error = (out.float() - expected).abs().max().item()
        if not error <= 2**-8 * expected.abs().max().item():
            raise KernelError(f"{name} is wrong by {error:.1e} at {rows} rows of {hidden} on rank {group.rank}")
        line[name] = microseconds(plan(x, out, None, buffer).run)
        line[f"{name}_norm"] = microseconds(plan(x, out, Norm(residual, weight, 1e-6), buffer).run)
    x.zero_()  # it is summed in place, over and over
    line["nccl"] = microseconds(lambda: nccl.all_reduce(x))
    line["nccl_norm"] = microseconds(lambda: add_rms_norm(nccl.all_reduce(x), residual, weight, 1e-6))
    chosen = choose_plan(rows, hidden, x.dtype, buffer)
    line["auto"] = next((name for name, (plan, _) in _PLANS.items() if plan is chosen), "nccl")
    return line


_COLUMNS = ("nccl", "one_shot", "two_shot", "nccl_norm", "one_shot_norm", "two_shot_norm")


def row_of_table(line: dict[str, Any]) -> str:
    """A line of `measure` as it is printed."""
    times = "".join(f"{'-' if line[name] is None else format(line[name], '.2f'):>10}" for name in _COLUMNS)
    return f"{line['hidden']:6}{line['rows']:5}{line['bytes'] / 1024:8.0f}{times}  {line['auto']}"


def measure_all(group: DistributedGroup, rows: Sequence[int], hidden: Sequence[int]) -> list[dict[str, Any]]:
    """Every size; rank 0 prints."""
    if group.rank == 0:
        titles = "".join(f"{name:>10}" for name in ("NCCL", "one", "two", "NCCL+norm", "one+norm", "two+norm"))
        print(f"{'hidden':>6}{'M':>5}{'KiB':>8}{titles}  auto   (us, {group.size} ranks)", flush=True)
    lines = []
    for columns in hidden:
        for count in rows:
            lines.append(measure(group, count, columns))
            if group.rank == 0:
                print(row_of_table(lines[-1]), flush=True)
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits with a sentence if they make no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, from 2 on")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="for example 1,8,64")
    parser.add_argument("--hidden", default=",".join(map(str, HIDDEN)), help="for example 4096,8192")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there as well")
    options = parser.parse_args(arguments)
    options.rows = read_numbers(parser, "--rows", options.rows)
    options.hidden = read_numbers(parser, "--hidden", options.hidden)
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks} has nothing to add up; give 2 or more")
    if torch.cuda.device_count() < options.ranks:
        parser.exit(1, f"This needs {options.ranks} CUDA devices, and torch sees {torch.cuda.device_count()}.\n")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    lines = run_on_ranks(options.ranks, measure_all, options.rows, options.hidden)
    if options.json is not None:
        names = {"gpu": torch.cuda.get_device_name(), "ranks": options.ranks, "torch": torch.__version__}
        options.json.write_text(json.dumps({**names, "microseconds": lines}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
