"""Options for the fields of `SamplingParams`: one table for every command that samples."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from tritonllm.cli.model_options import from_options
from tritonllm.cli.terminal import say
from tritonllm.sampling_params import SamplingParams
from tritonllm.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from tritonllm.engine.llm_engine import LLMEngine

MAX_TOKENS = 512


def _option(kind: Any, default: Any, help_text: str, *flags: str) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(*flags, help=help_text)], default


def _of_checkpoint(kind: Any, help_text: str, *flags: str) -> tuple[Any, Any]:
    return _option(kind | None, None, f"{help_text} The checkpoint's if left out.", *flags)


# By field of SamplingParams; what an option has as None is not given. Three fields have no option of their own:
# max_model_length is the engine's, max_tokens=None is a flag, and structured_outputs has the four of _FORMS.
_OPTIONS = {
    "max_tokens": _option(int, MAX_TOKENS, "Most tokens of an answer.", "--max-tokens", "-n"),
    "no_max_tokens": _option(bool, False, "Go on until the text ends or there is no room for more.", "--no-max-tokens"),
    "min_tokens": _option(int, 0, "No end of the text before so many tokens.", "--min-tokens"),
    "temperature": _of_checkpoint(float, "0 always takes the most probable token.", "--temperature", "-t"),
    "top_p": _of_checkpoint(float, "Sample from the most probable tokens of this mass; 1 is off.", "--top-p"),
    "top_k": _of_checkpoint(int, "Sample from that many most probable tokens; 0 is off.", "--top-k"),
    "min_p": _of_checkpoint(
        float, "Leave out tokens less than this times as probable as the most probable; 0 is off.", "--min-p"
    ),
    "repetition_penalty": _of_checkpoint(
        float, "Above 1, tokens of the prompt and the output become less probable.", "--repetition-penalty"
    ),
    "presence_penalty": _of_checkpoint(float, "Taken from the logits of tokens of the output.", "--presence-penalty"),
    "frequency_penalty": _of_checkpoint(
        float, "Taken from them once for each time they are in the output.", "--frequency-penalty"
    ),
    "seed": _option(int | None, None, "Same seed, same tokens. Random if left out.", "--seed"),
    "stop": _option(list[str] | None, None, "End the text before this string; may be given several times.", "--stop"),
    "stop_token_ids": _option(
        list[int] | None, None, "End the text at this token id; may be given several times.", "--stop-token-id"
    ),
    "ignore_eos": _option(bool, False, "Go on after an end-of-text id.", "--ignore-eos"),
    "include_stop_str_in_output": _option(bool, False, "Print what stopped the text, too.", "--include-stop"),
    "skip_special_tokens": _option(
        bool, True, "Leave special tokens out, or print them, too.", "--skip-special-tokens/--special-tokens"
    ),
    "bad_words": _option(
        list[str] | None, None, "A string that must not come up; may be given several times.", "--bad-word"
    ),
    "logit_bias": _option(
        list[str] | None,
        None,
        "ID=BIAS, from -100 to 100, added to the logit of a token id; may be given several times.",
        "--logit-bias",
    ),
    "allowed_token_ids": _option(
        list[int] | None, None, "Forbid all tokens but those given in this way.", "--allowed-token-id"
    ),
    "json_schema": _option(
        str | None, None, "The answer is JSON of the schema in this file (takes the extra structured).", "--json-schema"
    ),
    "regex": _option(str | None, None, "The answer matches this regular expression.", "--regex"),
    "choice": _option(list[str] | None, None, "The answer is this; given several times, one of them.", "--choice"),
    "grammar": _option(str | None, None, "The answer follows the Lark grammar in this file.", "--grammar"),
    "n": _option(int, 1, "Answers to the prompt; several are printed when all are there.", "--samples"),
    "logprobs": _option(
        int | None, None, "Report the log probability of each token, and of so many likeliest ones.", "--logprobs"
    ),
    "prompt_logprobs": _option(int | None, None, "The same for the tokens of the prompt.", "--prompt-logprobs"),
}

_FORMS = ("json_schema", "regex", "choice", "grammar")


def takes_sampling(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options above in the place of its parameter `sampling`.

    The command gets the fields that were given, checked before it begins: see `given_sampling`.

    Args:
        left_out: options that it does not take.
    """
    names = [name for name in _OPTIONS if name not in left_out]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        parameters = []
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name == "sampling":
                for name in names:
                    annotation, default = _OPTIONS[name]
                    parameters.append(parameter.replace(name=name, annotation=annotation, default=default))
            else:
                parameters.append(parameter.replace(annotation=hints[parameter.name]))

        def call(**values: Any) -> None:
            command(sampling=given_sampling(**{name: values.pop(name) for name in names}), **values)

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def given_sampling(no_max_tokens: bool = False, **options: Any) -> dict[str, Any]:
    """The fields of `SamplingParams` that were given, checked; None, or no values at all, is what was not."""
    given = {name: value for name, value in options.items() if value not in (None, [])}
    if no_max_tokens:
        given["max_tokens"] = None
    if "logit_bias" in given:
        given["logit_bias"] = dict(map(_bias, given["logit_bias"]))
    form = {name.removesuffix("_schema"): given.pop(name) for name in _FORMS if name in given}
    form |= {name: _text_of(form[name]) for name in ("json", "grammar") if name in form}
    if form:
        given["structured_outputs"] = from_options(StructuredOutputsParams, **form)
    from_options(SamplingParams, **given)
    return given


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} is not readable: {error}.") from error


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise typer.BadParameter(f"--logit-bias {text!r} is not ID=BIAS, as in 198=-100.") from error


def sampling_for(llm: LLMEngine, given: dict[str, Any]) -> SamplingParams:
    """These fields, and the checkpoint's recommendation for the others; says what it recommends."""
    params = SamplingParams.from_checkpoint(llm, **given)
    ours, theirs = (dataclasses.asdict(it) for it in (SamplingParams(**given), params))
    taken = ", ".join(f"{name}={value}" for name, value in theirs.items() if value != ours[name])
    if taken:
        say(f"sampling as the checkpoint's generation_config.json has it: {taken}")
    return params
