"""The commands that run a model: `generate` and `chat`."""

from __future__ import annotations

import contextlib
import importlib
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tritonllm.cli.answer import print_answers
from tritonllm.cli.model_options import (
    Device,
    DType,
    EnforceEager,
    MaxModelLength,
    Model,
    Stats,
    System,
    WorldSize,
    from_options,
)
from tritonllm.cli.sampling_options import sampling_for, takes_sampling
from tritonllm.cli.terminal import say, standard_input
from tritonllm.errors import RequestError
from tritonllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tritonllm.config import EngineConfig
    from tritonllm.engine.llm_engine import LLMEngine

Prompt = Annotated[str | None, typer.Argument(help="Read from standard input if left out.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")]
Stream = Annotated[bool, typer.Option("--stream/--no-stream", help="Print the text as it comes, or at once.")]
Json = Annotated[bool, typer.Option("--json", help="Print text, token ids, log probabilities and so on as JSON.")]

_MAX_ROWS = 16  # samples of a prompt that are decoded together

CHAT_HELP = """\
/clear   forget the conversation
/help    show this
/bye     leave, as Ctrl-D does
Ctrl-C stops an answer; what it said so far stays in the conversation."""


@takes_sampling()
def generate(
    model: Model,
    prompt: Prompt = None,
    raw: Raw = False,
    system: System = None,
    *,
    sampling: dict[str, Any],
    stream: Stream = True,
    as_json: Json = False,
    stats: Stats = False,
    max_model_length: MaxModelLength = None,
    device: Device = "auto",
    dtype: DType = "auto",
    enforce_eager: EnforceEager = False,
    world_size: WorldSize = 1,
) -> None:
    """Answer one prompt, printing the text as it comes.

    The prompt goes through the checkpoint's chat template if there is one. Temperature, top-p and the like that
    are not given are those of the checkpoint's generation_config.json, which is then said on standard error.
    """
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template that --raw leaves out.")
    num_rows = min(sampling["n"], _MAX_ROWS)
    config = _engine_config(model, max_model_length, device, dtype, enforce_eager, world_size, num_rows)
    text = _read_prompt(prompt)
    with _engine(config, stats) as llm:
        if system is None and (raw or not _has_chat_template(llm)):
            prompt_ids = _tokenize(llm, text)
        else:
            prompt_ids = llm.apply_chat_template([*_opening(system), _message("user", text)])
        print_answers(llm, prompt_ids, sampling_for(llm, sampling), stats, stream=stream, as_json=as_json)


@takes_sampling("n", "logprobs", "prompt_logprobs")
def chat(
    model: Model,
    system: System = None,
    *,
    sampling: dict[str, Any],
    stats: Stats = False,
    max_model_length: MaxModelLength = None,
    device: Device = "auto",
    dtype: DType = "auto",
    enforce_eager: EnforceEager = False,
    world_size: WorldSize = 1,
) -> None:
    """Talk with a model that has a chat template. /help lists what else you can type."""
    config = _engine_config(model, max_model_length, device, dtype, enforce_eager, world_size)
    prompt = ">>> " if standard_input().isatty() else ""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # from now on input() edits lines and has a history
    with _engine(config, stats) as llm:
        if not _has_chat_template(llm):
            raise RequestError(f"{model!r} has no chat template: use `tritonllm generate`.")
        params = sampling_for(llm, sampling)
        messages = _opening(system)
        for line in _lines(prompt):
            command = line.strip()
            if command == "/bye":
                break
            if command == "/clear":
                messages = _opening(system)
            elif command == "/help":
                say(CHAT_HELP)
            elif command.startswith("/") and len(command.split()) == 1:
                say(f"There is no command {command}; /help lists them.")
            elif command:
                messages = _turn(llm, [*messages, _message("user", line)], params, stats)


# ---- before the model is loaded ----


def _engine_config(
    model: str,
    max_model_length: int | None,
    device: str,
    dtype: str,
    enforce_eager: bool,
    world_size: int,
    max_num_sequences: int = 1,
) -> EngineConfig:
    from tritonllm.config import EngineConfig

    return from_options(
        EngineConfig,
        model_name_or_path=model,
        max_model_length=max_model_length,
        device=device,
        dtype=dtype,
        enforce_eager=enforce_eager,
        world_size=world_size,
        max_num_sequences=max_num_sequences,
        seed=secrets.randbits(64),
    )


def _read_prompt(prompt: str | None) -> str:
    """The argument, or all of standard input without its last line end."""
    try:
        if prompt is None:
            stdin = standard_input()
            if stdin.isatty():
                say("Type the prompt, then Ctrl-D on a line of its own.")
            prompt = stdin.read().removesuffix("\n")
        prompt.encode()
    except UnicodeError as error:
        raise typer.BadParameter("the prompt is not valid UTF-8.") from error
    if not prompt.strip():
        raise typer.BadParameter("the prompt is empty.")
    return prompt


# ---- with a model ----


@contextlib.contextmanager
def _engine(config: EngineConfig, stats: bool) -> Iterator[LLMEngine]:
    if sys.stderr is not None and sys.stderr.isatty():
        say(f"Loading {config.model_name_or_path} ...")
    start = time.perf_counter()
    with _interrupt_noted() as noted:  # code that runs inside an import may swallow an exception
        from tritonllm import LLMEngine
    if noted.is_set():
        raise KeyboardInterrupt
    with LLMEngine(config) as llm:
        if stats:
            say(f"ready in {time.perf_counter() - start:.2f} s on {llm.config.device}, {llm.config.dtype}")
        yield llm


def _has_chat_template(llm: LLMEngine) -> bool:
    return bool(getattr(llm.tokenizer, "chat_template", None))


def _tokenize(llm: LLMEngine, text: str) -> list[int]:
    from tritonllm.engine.prompts import tokenize

    return tokenize(text, llm.tokenizer, llm.model_config.vocab_size)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _opening(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [_message("system", system)]


# ---- the chat loop ----


def _lines(prompt: str) -> Iterator[str]:
    """Lines that the user types, until Ctrl-D. Ctrl-C drops the line. The prompt is empty without a terminal."""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            if prompt:
                say("")
            return
        except KeyboardInterrupt:
            say("\nCtrl-D or /bye leaves.")
            continue
        yield line


def _turn(llm: LLMEngine, messages: list[dict[str, str]], params: SamplingParams, stats: bool) -> list[dict[str, str]]:
    """Answer a conversation that ends with the user's message; returns it with the answer.

    A message that cannot be served is told to the user and dropped.
    """
    try:
        with _interrupt_noted() as noted:
            text = print_answers(llm, llm.apply_chat_template(messages), params, stats, noted.is_set)
    except RequestError as error:
        say(f"error: {error}; /clear forgets the conversation")
        return messages[:-1]
    while not llm.scheduler.is_finished():  # what is left of a stopped answer
        llm.step()
    return [*messages, _message("assistant", text)]


@contextlib.contextmanager
def _interrupt_noted() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that what is inside is not cut in half; a second one raises as usual."""
    noted = threading.Event()

    def note(*_: object) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
