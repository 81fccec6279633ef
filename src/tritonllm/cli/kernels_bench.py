"""The command `kernels bench`: each op against what the GPU at hand allows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tritonllm.cli.bench_options import AsJson, BlockSize, Output, check_output, numbers
from tritonllm.cli.terminal import say
from tritonllm.errors import ConfigError, TritonLLMError

if TYPE_CHECKING:
    from tritonllm.bench.kernels.catalog import Row

_MODEL = "Qwen3-0.6B"


def kernels_bench(
    model: Annotated[
        str | None, typer.Option("--model", help=f"Shipped shape, folder, .gguf file or hub id; {_MODEL} if left out.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", help="Measure the rows of this JSON file instead, or the shipped list h200.")
    ] = None,
    op: Annotated[list[str] | None, typer.Option("--op", help="Only this op; can be given again.")] = None,
    batches: Annotated[str, typer.Option("--batches", help="Rows of the model's decode steps.")] = "1,8,64",
    context: Annotated[int, typer.Option("--context", min=1, help="Keys of each of these rows.")] = 1024,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens of the model's prompt.")] = 8192,
    block_size: BlockSize = 256,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 or float16.")] = "bfloat16",
    plot: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw the roofline: a .png, .svg or .pdf file.")
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Measure each op at a model's shapes, and say how near the GPU's limits that is.

    The limits are measured first. Every result is compared with a reference before it is timed; the exit code is 1 if
    one is wrong or fails.
    """
    if rows is not None and model is not None:
        raise typer.BadParameter("give --model or --rows, not both.")
    if dtype not in ("bfloat16", "float16"):
        raise typer.BadParameter(f"--dtype {dtype!r} is neither bfloat16 nor float16.")
    sizes = numbers("--batches", batches)
    check_output(output)
    if plot is not None:
        _check_plot(plot)
    chosen = _only(op or [], _rows(model or _MODEL, rows, sizes, context, prompt_tokens, block_size))
    report = _measure(rows or model or _MODEL, chosen, dtype, as_json)
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        from tritonllm.bench.plot import plot_roofline

        plot_roofline(report, plot)
        say(f"The plot is in {plot}.")
    if any(row["failed"] is not None for row in report["rows"]):
        raise typer.Exit(1)


def _check_plot(plot: Path) -> None:
    from tritonllm.bench.plot import SUFFIXES, require_matplotlib

    if plot.suffix.lower() not in SUFFIXES:
        raise typer.BadParameter(f"--plot {plot} must end in one of {', '.join(SUFFIXES)}.")
    check_output(plot, "--plot")
    require_matplotlib()


def _rows(
    model: str, rows: str | None, batches: Sequence[int], context: int, prompt_tokens: int, block_size: int
) -> list[Row]:
    from tritonllm.bench.kernels.catalog import model_rows, read_rows
    from tritonllm.bench.target import model_shape, norms_heads

    if rows is not None:
        try:
            return read_rows(rows)
        except ConfigError as error:
            raise typer.BadParameter(f"--rows: {error}") from error
    shape = model_shape(model)
    return model_rows(shape, norms_heads(model, shape), batches, context, prompt_tokens, block_size)


def _only(ops: Sequence[str], rows: list[Row]) -> list[Row]:
    known = dict.fromkeys(row.case.op for row in rows)
    if unknown := [name for name in ops if name not in known]:
        raise typer.BadParameter(f"--op {unknown[0]!r} is in none of the rows: the ops are {', '.join(known)}.")
    return [row for row in rows if row.case.op in (ops or known)]


def _measure(name: str, rows: list[Row], dtype: str, quiet: bool) -> dict[str, Any]:
    """The report; its table goes to standard output row by row, or in the end as one line of JSON."""
    import torch

    from tritonllm.bench.kernels.case import Place
    from tritonllm.bench.kernels.report import run

    if not torch.cuda.is_available():
        raise TritonLLMError("`tritonllm kernels bench` measures a GPU, and torch sees none here.")
    place = Place(torch.device("cuda", torch.cuda.current_device()), getattr(torch, dtype))
    report = run(name, rows, place, (lambda line: None) if quiet else typer.echo)
    if quiet:
        typer.echo(json.dumps(report))
    return report
