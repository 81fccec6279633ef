"""Options that the commands that run a model have in common, but for those of sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from tritonllm.errors import TritonLLMError

_T = TypeVar("_T")

Model = Annotated[str, typer.Argument(help="Hub id, local folder, .gguf file, or name of a packaged model.")]
System = Annotated[str | None, typer.Option("--system", "-s", help="System message in front of the conversation.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print token counts and times to standard error.")]
MaxModelLength = Annotated[int | None, typer.Option("--max-model-length", help="Most tokens of prompt and output.")]
Device = Annotated[str, typer.Option("--device", help="auto, cuda or cpu.")]
DType = Annotated[str, typer.Option("--dtype", help="auto, bfloat16, float16 or float32.")]
WorldSize = Annotated[int, typer.Option("--world-size", help="Ranks that hold the model together, one a GPU.")]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="Decode without CUDA graphs: starts sooner.")]


def from_options(make: Callable[..., _T], **values: Any) -> _T:
    """Make a checked value; what it refuses is wrong usage, told before anything is loaded."""
    try:
        return make(**values)
    except TritonLLMError as error:
        raise typer.BadParameter(str(error)) from error
