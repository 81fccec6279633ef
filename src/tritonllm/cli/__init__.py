"""The command line: `generate` and `chat` run a model, `bench` measures it, `roofline` says what a GPU allows,
`kernels` compiles for it and measures it, `models` and `plugins` list what is known, `plugins new` and `plugins check`
begin and test a plugin, and `doctor` looks for what is wrong with the machine.

A model's text goes to standard output, everything else to standard error. torch, and whatever imports it, is imported
inside the commands that need it, so `--help` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from tritonllm import __version__
from tritonllm.cli.bench import bench_app
from tritonllm.cli.doctor import doctor
from tritonllm.cli.kernels import kernels_app
from tritonllm.cli.kernels_bench import kernels_bench
from tritonllm.cli.listing import models
from tritonllm.cli.model import chat, generate
from tritonllm.cli.plugins import plugins_app
from tritonllm.cli.roofline import roofline
from tritonllm.cli.terminal import say, show_warning
from tritonllm.errors import TritonLLMError

# Help in plain text: rich would take longer to import than everything else together.
app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, chat, models, roofline, doctor):
    app.command()(command)
app.add_typer(bench_app, name="bench")
kernels_app.command("bench")(kernels_bench)
app.add_typer(kernels_app, name="kernels")
app.add_typer(plugins_app, name="plugins")


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
                app(args, prog_name="tritonllm")
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


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A pure-Triton LLM inference engine for Hugging Face checkpoints."""
