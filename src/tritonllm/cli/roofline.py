"""The command `roofline`: what a model can do at best on a GPU that need not be here."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tritonllm.cli.bench_options import AsJson, MatrixRate, MemoryRate, numbers


def roofline(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, shipped shape, or hub id.", show_default=False)],
    gpu: Annotated[str, typer.Option("--gpu", help="h200, h100, a100, l4, rtx4090, mi300x and others.")] = "h200",
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")] = "bfloat16",
    batches: Annotated[str, typer.Option("--batches", help="Separated by commas.")] = "1,8,64,256",
    contexts: Annotated[str, typer.Option("--contexts", help="Keys of each row.")] = "1024,8192",
    prompts: Annotated[str, typer.Option("--prompts", help="Lengths of prompts.")] = "128,1024,8192",
    memory_rate: MemoryRate = None,
    matrix_rate: MatrixRate = None,
    as_json: AsJson = False,
) -> None:
    """The least time of a decode step and of a prompt, from config.json and the rates of a GPU alone."""
    if dtype not in ("bfloat16", "float16", "float32"):
        raise typer.BadParameter(f"--dtype {dtype!r} is none of bfloat16, float16 and float32.")
    sizes = numbers("--batches", batches), numbers("--contexts", contexts), numbers("--prompts", prompts)
    from tritonllm.bench.limits import Rates
    from tritonllm.bench.roofline import find_gpu, predict, table
    from tritonllm.bench.target import model_shape

    sheet = find_gpu(gpu)
    if dtype == "float32" and matrix_rate is None:
        raise typer.BadParameter("data sheets here are of two-byte types: give --matrix-rate with float32.")
    memory = sheet.rates.memory if memory_rate is None else memory_rate * 1e12
    matrix = sheet.rates.matrix if matrix_rate is None else matrix_rate * 1e12
    report = predict(model_shape(model), dtype, sheet, Rates(memory, matrix), *sizes)
    typer.echo(json.dumps({"model": model, **report}) if as_json else "\n".join(table(model, report)))
