"""Latency over batch size as a picture. Needs matplotlib, which the extra `bench` brings."""

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
