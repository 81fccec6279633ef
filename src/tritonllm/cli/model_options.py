"""What the commands that run a model have in common: options, and the sampling that they ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tritonllm.cli.terminal import say
from tritonllm.errors import TritonLLMError
from tritonllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tritonllm.engine.llm_engine import LLMEngine

_T = TypeVar("_T")

MAX_TOKENS = 512

Model = Annotated[str, typer.Argument(help="Hub id, local folder, .gguf file, or name of a packaged model.")]
System = Annotated[str | None, typer.Option("--system", "-s", help="System message in front of the conversation.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens of an answer.")]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", help="0 always takes the most probable token. The checkpoint's if left out."),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", help="Sample from the most probable tokens of this mass; 1 is off. The checkpoint's if left out."
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", help="Sample from that many most probable tokens; 0 is off. The checkpoint's if left out."),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same tokens. Random if left out.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="End the text before this string; may be given several times.")
]
StopTokenId = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="End the text at this token id; may be given several times.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text id.")]
IncludeStop = Annotated[bool, typer.Option("--include-stop", help="Print what stopped the text, too.")]
SpecialTokens = Annotated[bool, typer.Option("--special-tokens", help="Print special tokens, too.")]
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


def given_sampling(**options: Any) -> dict[str, Any]:
    """The fields of `SamplingParams` that were given, checked; None is what was not."""
    given = {name: value for name, value in options.items() if value is not None}
    from_options(SamplingParams, **given)
    return given


def sampling_for(llm: LLMEngine, given: dict[str, Any]) -> SamplingParams:
    """These fields, and the checkpoint's recommendation for the others; says what it recommends."""
    params = SamplingParams.from_checkpoint(llm, **given)
    ours, theirs = (dataclasses.asdict(it) for it in (SamplingParams(**given), params))
    taken = ", ".join(f"{name}={value}" for name, value in theirs.items() if value != ours[name])
    if taken:
        say(f"sampling as the checkpoint's generation_config.json has it: {taken}")
    return params
