"""What the commands of `tritonllm bench` have in common: options, and checks before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tritonllm.errors import ConfigError

if TYPE_CHECKING:
    from tritonllm.config import EngineConfig


def _positive(rate: float | None) -> float | None:
    if rate is not None and not 0 < rate < float("inf"):
        raise typer.BadParameter(f"{rate} is no rate above 0.")
    return rate


Model = Annotated[
    str, typer.Argument(help="Folder, .gguf file, shipped shape such as Qwen3-0.6B, or hub id.", show_default=False)
]
LoadFormat = Annotated[str, typer.Option("--load-format", help="dummy for random weights, auto for the model's own.")]
DType = Annotated[str, typer.Option("--dtype", help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option("--device", help="auto, cuda or cpu.")]
Runs = Annotated[int, typer.Option("--runs", min=1, help="Measure that often; the median is reported.")]
Budget = Annotated[int, typer.Option("--max-num-batched-tokens", min=1, help="Most tokens of one step.")]
PromptTokensBeside = Annotated[
    int,
    typer.Option(
        "--max-prefill-tokens-beside-decode",
        min=1,
        help="Most prompt tokens of a step that decodes, for each prompt.",
    ),
]
BlockSize = Annotated[int, typer.Option("--block-size", min=1, help="Tokens of one block of the KV cache.")]
WorldSize = Annotated[int, typer.Option("--world-size", min=1, help="Ranks that hold the model, one a GPU.")]
AllReduce = Annotated[str, typer.Option("--all-reduce", help="auto or nccl: how sums over GPUs are made.")]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="Decode without CUDA graphs.")]
MemoryRate = Annotated[
    float | None,
    typer.Option("--memory-rate", callback=_positive, help="The device's, in TB/s, for floors; known for an H200."),
]
MatrixRate = Annotated[
    float | None, typer.Option("--matrix-rate", callback=_positive, help="The device's, in TFLOP/s, for floors.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of a table.")]
Output = Annotated[Path | None, typer.Option("--output", dir_okay=False, help="Write the JSON to that file as well.")]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens of each prompt.")]


def engine_config(model: str, load_format: str, **keys: Any) -> EngineConfig:
    """The engine's configuration; a value it refuses is wrong usage, a name that nothing has an error."""
    from tritonllm.bench.target import engine_config as find
    from tritonllm.config import EngineConfig

    try:
        EngineConfig(model_name_or_path=model, load_format=load_format, **keys)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    return find(model, load_format, **keys)


def numbers(option: str, text: str) -> list[int]:
    """Numbers above 0, separated by commas or spaces."""
    words = text.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise typer.BadParameter(f"{option} {text!r} is no list of numbers above 0, such as 1,8,16.")
    return [int(word) for word in words]


def check_output(path: Path | None, option: str = "--output") -> None:
    """Before anything is measured, not after."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{option} {path}: there is no folder {path.absolute().parent}.")
