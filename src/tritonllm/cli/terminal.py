"""What the commands write beside a model's text."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console


def say(text: str) -> None:
    """One message to the user, on standard error."""
    typer.echo(text, err=True)


def standard_input() -> TextIO:
    """Standard input, which a process may be started without.

    Raises:
        OSError: this one was.
    """
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return sys.stdin


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """In place of `warnings.showwarning`: the message alone, without the line of code that gave it."""
    say(f"warning: {message}")


def print_json(value: object) -> None:
    """A value as JSON on standard output."""
    typer.echo(json.dumps(value, indent=2))


def console() -> Console:
    """Standard output through rich: styles on a terminal only, and none under NO_COLOR."""
    from rich.console import Console

    # rich keeps bold and dim under NO_COLOR; without a color system it writes no escape sequence at all.
    return Console(color_system=None if os.environ.get("NO_COLOR") else "auto")
