"""The command line: `generate` and `chat` run a model, `bench` measures it, `roofline` says what a GPU allows,
`kernels` compiles for it and measures it, `models` and `plugins` list what is known, `plugins new` and `plugins check`
begin and test a plugin, and `doctor` looks for what is wrong with the machine.

A model's text goes to standard output, everything else to standard error. torch, and whatever imports it, is imported
inside the commands that need it, so `--help` answers at once.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from tritonllm import __version__
from tritonllm.cli.terminal import say, show_warning
from tritonllm.errors import TritonLLMError

_MODULES = {
    "generate": "model",
    "chat": "model",
    "models": "listing",
    "roofline": "roofline",
    "doctor": "doctor",
    "bench": "bench",
    "kernels": "kernels",
    "plugins": "plugins",
}
"""Where each command is, in the order of the help."""


def make_app(commands: Iterable[str] = _MODULES) -> typer.Typer:
    """The command line with these commands alone: what a run does not ask for need not be imported and set up."""
    # Help in plain text: rich would take longer to import than everything else together.
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in commands:
        module = importlib.import_module(f"tritonllm.cli.{_MODULES[name]}")
        if group := getattr(module, f"{name}_app", None):
            app.add_typer(group, name=name)
        else:
            app.command()(getattr(module, name))
    return app


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line on `args` (default: those of this process) and leave with its exit code.

    0 is success, 1 an error of tritonllm or of the system (one line on standard error), 2 wrong usage, 130 Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # models write more than every terminal can show
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        try:
            if sys.stdout is None:
                raise OSError("standard output is closed")
            try:
                words = sys.argv[1:] if args is None else list(args)
                if words[:1] == ["plugins"] and set(words[1:]) <= {"--json"}:
                    # Newer typers parse options by pydantic, which takes longer to import than all the rest together.
                    from tritonllm.cli.plugins import list_plugins

                    sys.exit(list_plugins(as_json=len(words) > 1))
                first = next((word for word in words if not word.startswith("-")), "")
                make_app([first] if first in _MODULES else _MODULES)(words, prog_name="tritonllm")
            finally:
                _flush_output()
        except (TritonLLMError, OSError) as error:
            say("error: " + " ".join(str(error).split()))
            sys.exit(1)


def _flush_output() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        # What is left goes nowhere, or Python would try and fail again on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tritonllm {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A pure-Triton LLM inference engine for Hugging Face checkpoints."""
