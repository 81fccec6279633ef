"""The commands that say what is known and load no model: `models` and `plugins`."""

from __future__ import annotations

import dataclasses
import os
import textwrap
import warnings
from typing import Annotated

import typer

from tritonllm.cli.terminal import console, print_json, say

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


def plugins(as_json: AsJson = False) -> None:
    """Load every installed plugin by itself and report on it. The exit code is 1 if one failed."""
    from tritonllm.plugin_discovery import PLUGINS_VARIABLE
    from tritonllm.registry import default_registry

    registry = default_registry()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a failure is in the report
        loaded = registry.plugins()
    if as_json:
        print_json([dataclasses.asdict(plugin) for plugin in loaded])
    elif loaded:
        from rich.table import Table
        from rich.text import Text

        table = Table("plugin", "package", "models", "seconds", "remarks", box=None, pad_edge=False)
        for plugin in loaded:
            slow = "imports torch, which makes every listing slow" if plugin.imports_torch else ""
            names = " ".join(spec.name for spec in plugin.specs)
            cells = (plugin.name, plugin.distribution, names, f"{plugin.seconds:.2f}", plugin.error or slow)
            table.add_row(*map(Text, cells))
        console().print(table)
    else:
        restricted = os.environ.get(PLUGINS_VARIABLE) is not None
        say(f"No plugin is {f'allowed by {PLUGINS_VARIABLE}' if restricted else 'installed'}.")
    if any(plugin.error for plugin in loaded):
        raise typer.Exit(1)
