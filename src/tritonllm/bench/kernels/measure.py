"""Measuring: what the device reaches at best, then each row by itself, found right before it is timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from tritonllm.bench.graph_timing import chain_microseconds
from tritonllm.bench.kernels.case import Case, Place, Timed, Work
from tritonllm.bench.kernels.catalog import Bar, Row
from tritonllm.bench.limits import Rates
from tritonllm.errors import KernelError

Timer = Callable[[Sequence[Callable[[], object]]], float]
"""From calls to the microseconds of one of them."""

_COPY_BYTES = 1 << 30
_MATRIX_SIDE = 8192
_CEILING_CALLS = 4


def measure_ceilings(
    place: Place, timer: Timer = chain_microseconds, copy_bytes: int = _COPY_BYTES, side: int = _MATRIX_SIDE
) -> Rates:
    """Bytes a second of memory, and operations a second of a product of two square matrices of that side.

    Memory counts at the best of three: so many bytes copied, negated, or added up. (The driver's own copy is not always
    the fastest.)
    """
    source = torch.zeros(copy_bytes // 4, dtype=torch.int32, device=place.device)
    target, total = torch.empty_like(source), torch.empty((), dtype=torch.int32, device=place.device)
    ways = {
        partial(target.copy_, source): 2,
        partial(torch.neg, source, out=target): 2,
        partial(torch.sum, source, dim=0, dtype=torch.int32, out=total): 1,
    }
    moved = max(times * copy_bytes / timer([call] * _CEILING_CALLS) for call, times in ways.items())
    del source, target, ways
    left, right, out = place.normal(3, side, side)
    multiplied = timer([partial(torch.mm, left, right, out=out)] * _CEILING_CALLS)
    return Rates(memory=moved * 1e6, matrix=2 * side**3 / multiplied * 1e6)


def measure_rows(
    rows: Iterable[Row], place: Place, rates: Rates, timer: Timer = chain_microseconds
) -> Iterator[dict[str, Any]]:
    """Each row's numbers as they come.

    A row that fails has its error in `failed` and the next one is measured; only a device that answers no more ends the
    rest, each with that reason.

    Yields:
        `op`, `shape` and the fields of the case as `case`; `bytes`, `operations`, `floor_us` and what it is `bound` by;
        `us`, `fraction` of the floor, `tb_per_second`, `tflops` and `error`; `rivals`, microseconds by name, and
        `failed_rivals`, reasons by name; `bar` and whether it was `reached`; `failed` and `skipped`, reasons; `seconds`
        that all of it took. What does not apply is None.
    """
    lost = None
    for row in rows:
        start = time.perf_counter()
        found = _unmeasured(row, place, rates)
        found["failed"], found["skipped"] = lost, row.case.unsupported(place)
        if lost is None and found["skipped"] is None:
            try:
                found |= _measured(row.case, place, timer)
            except Exception as error:  # of any kind: a row must not take the others with it
                found["failed"] = _one_line(error)
            else:
                found |= _judged(row, found)
            lost = _free(place)
        found["seconds"] = round(time.perf_counter() - start, 3)
        yield found


def _unmeasured(row: Row, place: Place, rates: Rates) -> dict[str, Any]:
    work: Work = row.case.work(place.dtype.itemsize)
    given = {name: value for name, value in vars(row.case).items() if value is not None}
    fields = {name: value if isinstance(value, (int, float)) else str(value) for name, value in given.items()}
    return {
        "op": row.case.op,
        "shape": row.case.shape,
        "case": fields,
        "bytes": work.bytes,
        "operations": work.operations,
        "floor_us": work.seconds(rates) * 1e6,
        "bound": work.bound(rates),
        **dict.fromkeys(("us", "fraction", "tb_per_second", "tflops", "error")),
        "rivals": {},
        "failed_rivals": {},
        "bar": None if row.bar is None else asdict(row.bar),
        "reached": None,
    }


def _measured(case: Case, place: Place, timer: Timer) -> dict[str, Any]:
    """Time, error, and the same work by others.

    Raises:
        KernelError: the op computes something else than its reference.
    """
    prepared = case.prepare(place)
    place.synchronize()
    error = _checked(prepared.op)
    found: dict[str, Any] = {"error": error, "us": timer(prepared.op.calls), "rivals": {}, "failed_rivals": {}}
    for name, rival in prepared.rivals.items():
        try:
            _checked(rival)
            found["rivals"][name] = timer(rival.calls)
        except Exception as failure:  # it is not there, or not for this shape
            found["failed_rivals"][name] = _one_line(failure)
    return found


def _checked(timed: Timed) -> float:
    error = timed.error()
    if not error <= timed.bound:
        raise KernelError(f"the result is wrong: its error is {error:.1e}, and {timed.bound:.1e} is allowed")
    return error


def _judged(row: Row, found: dict[str, Any]) -> dict[str, Any]:
    microseconds = found["us"]
    return {
        "fraction": found["floor_us"] / microseconds,
        "tb_per_second": found["bytes"] / microseconds * 1e-6,
        "tflops": found["operations"] / microseconds * 1e-6,
        "reached": None if row.bar is None else _reaches(row.bar, found),
    }


def _reaches(bar: Bar, found: dict[str, Any]) -> bool:
    """Whether all that a bar asks is there; a rival that could not be timed is not beaten."""
    microseconds = found["us"]
    return (
        (bar.us is None or microseconds <= bar.us)
        and (bar.tflops is None or found["operations"] / microseconds * 1e-6 >= bar.tflops)
        and (bar.rival is None or microseconds <= found["rivals"].get(bar.rival, 0.0))
    )


def _free(place: Place) -> str | None:
    """Give a row's memory back; why the device answers no more, None if it does."""
    gc.collect()  # calls and their tensors know each other
    if place.device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(place.device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return f"not measured: the device failed in a row before ({_one_line(error)})"
    return None


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
