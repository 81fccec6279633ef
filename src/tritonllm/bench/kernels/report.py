"""The whole measurement: a table that grows row by row, and the same facts as a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from tritonllm.bench.graph_timing import chain_microseconds
from tritonllm.bench.kernels.case import Place
from tritonllm.bench.kernels.catalog import Bar, Row
from tritonllm.bench.kernels.measure import Timer, measure_ceilings, measure_rows
from tritonllm.bench.limits import Rates
from tritonllm.bench.report import machine

_NUMBERS = ("us", "floor", "of it", "TB/s", "TFLOP/s")
_WIDTHS = (11, 11, 7, 7, 9)


class Table:
    """Lines of a table whose columns are as wide as these rows need."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._op = max(len(row.case.op) for row in rows)
        self._shape = max(len(row.case.shape) for row in rows)

    def title(self) -> str:
        """The first line."""
        numbers = "".join(f"{name:>{width}}" for name, width in zip(_NUMBERS, _WIDTHS, strict=True))
        return f"{'op':{self._op}}  {'shape':{self._shape}}{numbers}  beside it, bar"

    def line(self, found: Mapping[str, Any]) -> str:
        """One row: its numbers, or why it has none."""
        start = f"{found['op']:{self._op}}  {found['shape']:{self._shape}}"
        if found["skipped"] is not None:
            return f"{start}  skipped: {found['skipped']}"
        if found["failed"] is not None:
            return f"{start}  FAILED: {found['failed']}"
        cells = (
            f"{found['us']:,.2f}",
            f"{found['floor_us']:,.2f}",
            f"{found['fraction']:.0%}",
            f"{found['tb_per_second']:.2f}",
            f"{found['tflops']:,.0f}" if found["operations"] else "-",
        )
        numbers = "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
        beside = [f"{name} {us:,.2f} ({us / found['us']:.2f}x)" for name, us in found["rivals"].items()]
        beside += [f"{name} failed" for name in found["failed_rivals"]]
        if found["bar"] is not None:
            beside.append(f"{Bar(**found['bar'])}: {'reached' if found['reached'] else 'MISSED'}")
        return f"{start}{numbers}  {', '.join(beside)}".rstrip()


def summary(found: Sequence[Mapping[str, Any]]) -> str:
    """The last line: how many rows were measured, failed and were skipped, and how many bars were reached."""
    failed = sum(row["failed"] is not None for row in found)
    skipped = sum(row["skipped"] is not None and row["failed"] is None for row in found)
    parts = [f"{len(found) - failed - skipped} rows measured"]
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{skipped} skipped"] if skipped else []
    barred = [row for row in found if row["bar"] is not None]
    if barred:
        parts.append(f"{sum(row['reached'] is True for row in barred)} of {len(barred)} bars reached")
    return ", ".join(parts)


def run(
    name: str,
    rows: Sequence[Row],
    place: Place,
    tell: Callable[[str], object],
    timer: Timer = chain_microseconds,
    ceilings: Callable[[Place, Timer], Rates] = measure_ceilings,
) -> dict[str, Any]:
    """Measure the ceilings, then the rows.

    Args:
        name: of the model or of the list that the rows are from.
        rows, place: what is measured, and where.
        tell: takes each line of the table as soon as it is known.
        timer, ceilings: how calls and ceilings are timed.

    Returns:
        `benchmark`, `name`, `conditions`, `ceilings` in bytes and operations a second, `rows` as `measure_rows` gives
        them, and `seconds` of all.
    """
    start = time.perf_counter()
    dtype = str(place.dtype).removeprefix("torch.")
    conditions = {**machine(place.device.type), "dtype": dtype}
    versions = f"torch {conditions['torch']}, Triton {conditions['triton']}, tritonllm {conditions['tritonllm']}"
    table, found = Table(rows), []
    with torch.inference_mode():
        torch.manual_seed(0)
        rates = ceilings(place, timer)
        tell(f"{name} in {dtype} on {conditions['gpu'] or place.device.type}, {versions}")
        tell(f"memory reaches {rates.memory / 1e12:.2f} TB/s, a product {rates.matrix / 1e12:.0f} TFLOP/s")
        tell("")
        tell(table.title())
        for row in measure_rows(rows, place, rates, timer):
            found.append(row)
            tell(table.line(row))
    seconds = time.perf_counter() - start
    tell("")
    tell(f"{summary(found)}, {seconds:.0f} s")
    return {
        "benchmark": "kernels",
        "name": name,
        "conditions": conditions,
        "ceilings": asdict(rates),
        "rows": found,
        "seconds": round(seconds, 1),
    }
