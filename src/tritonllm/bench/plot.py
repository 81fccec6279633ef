"""Latency over batch size and the roofline of kernels as pictures. Needs matplotlib, which the extra `bench` brings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritonllm.errors import TritonLLMError

SUFFIXES = (".png", ".svg", ".pdf")


def require_matplotlib() -> None:
    """Raise TritonLLMError, before anything is measured, if no picture can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise TritonLLMError(
            "--plot needs matplotlib, which is not installed: `pip install 'tritonllm-engine[bench]'` brings it."
        ) from error


def plot_latency(report: Mapping[str, Any], path: Path) -> None:
    """Draw milliseconds a token over batch size, and the floor where it is known."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = sorted(report["batches"], key=lambda row: row["batch"])
    batches = [row["batch"] for row in rows]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(batches, [row["ms_per_token"] for row in rows], marker="o", label="measured")
    if all(row["floor_ms"] is not None for row in rows):
        axes.plot(batches, [row["floor_ms"] for row in rows], linestyle="--", label="floor")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch")
    axes.set_ylabel("ms a token")
    where = report["conditions"]["gpu"] or report["conditions"]["device"]
    axes.set_title(
        f"{report['model']}, {report['conditions']['dtype']}, {where}: "
        f"{report['prompt_tokens']:,} tokens in, {report['output_tokens']:,} out"
    )
    axes.legend()
    figure.savefig(path)


def plot_roofline(report: Mapping[str, Any], path: Path) -> None:
    """Draw the ceilings with the rows that multiply matrices, and beside it each measured row's share of its floor."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if row["us"] is not None]
    memory, matrix = report["ceilings"]["memory"] / 1e12, report["ceilings"]["matrix"] / 1e12
    figure = Figure(figsize=(15, max(6, 0.19 * len(rows))), layout="constrained")
    FigureCanvasAgg(figure)
    roof, shares = figure.subplots(1, 2)

    ridge = matrix / memory
    intensities = {id(row): row["operations"] / row["bytes"] for row in rows if row["operations"]}
    ends = [min([ridge, *intensities.values()]) / 2, ridge, max([ridge, *intensities.values()]) * 2]
    roof.plot(ends, [memory * ends[0], matrix, matrix], color="black", linewidth=1)
    for op in dict.fromkeys(row["op"] for row in rows if row["operations"]):
        of_op = [row for row in rows if row["op"] == op and row["operations"]]
        roof.scatter([intensities[id(row)] for row in of_op], [row["tflops"] for row in of_op], s=18, label=op)
    roof.set_box_aspect(1)
    roof.set_xscale("log")
    roof.set_yscale("log")
    roof.set_xlabel("operations a byte")
    roof.set_ylabel("TFLOP/s")
    roof.set_title(f"{memory:.2f} TB/s, {matrix:.0f} TFLOP/s, both measured")
    if intensities:
        roof.legend(fontsize=7)

    names = [f"{row['op']} {row['shape']}" for row in rows]
    places = range(len(rows))
    shares.barh(places, [100 * row["fraction"] for row in rows])
    shares.set_yticks(places, names, fontsize=6)
    shares.invert_yaxis()
    shares.margins(y=0.01)
    shares.axvline(100, color="black", linewidth=1)
    shares.set_xlabel("floor over time, percent")
    conditions = report["conditions"]
    figure.suptitle(f"{report['name']}, {conditions['dtype']}, {conditions['gpu']}")
    figure.savefig(path)
