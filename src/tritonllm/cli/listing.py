"""The command that says what is known and loads no model: `models`."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Annotated

import typer

from tritonllm.cli.terminal import console, print_json

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def models(as_json: AsJson = False) -> None:
    """List the model families, and the checkpoints that are known by name.

    Any other checkpoint is served by its architecture.
    """
    from rich.text import Text

    from tritonllm.registry import default_registry

    specs = default_registry().specs()
    if as_json:
        print_json([{"package": owner, **dataclasses.asdict(spec)} for owner, spec in specs])
        return
    out = console()
    for owner, spec in specs:
        out.print(Text.assemble((spec.name, "bold"), f"  {' '.join(spec.architectures)}  from {owner}"))
        names = "  ".join(spec.checkpoints)
        indent = "  "
        out.print(
            Text(
                textwrap.fill(names, out.width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
            )
        )
