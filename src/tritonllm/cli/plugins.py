"""The commands around plugins: `plugins` lists them, `plugins check` tests a family, `plugins new` begins a package."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tritonllm.cli.listing import AsJson
from tritonllm.cli.terminal import print_json, say
from tritonllm.errors import PluginError

if TYPE_CHECKING:
    from tritonllm.plugin_discovery import Plugin

plugins_app = typer.Typer(
    invoke_without_command=True, rich_markup_mode=None, help="List plugins, test a model family, begin a plugin."
)


@plugins_app.callback()
def plugins(context: typer.Context, as_json: AsJson = False) -> None:
    """List plugins, or test and write one with the commands below.

    Every installed plugin is loaded by itself. The exit code is 1 if one failed, or if two claim the same name.
    """
    if context.invoked_subcommand is None:
        raise typer.Exit(list_plugins(as_json))


def list_plugins(as_json: bool) -> int:
    """Print the listing; the exit code."""
    from tritonllm.plugin_discovery import PLUGINS_VARIABLE
    from tritonllm.registry import default_registry

    registry = default_registry()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a failure is in the report
        loaded = registry.plugins()
        conflicts = registry.conflicts()
    if as_json:
        print_json([_as_json(plugin, conflicts) for plugin in loaded])
    elif loaded:
        for plugin in loaded:
            typer.echo(_described(plugin))
        for conflict in conflicts:
            typer.echo(f"conflict: {conflict}")
    else:
        restricted = os.environ.get(PLUGINS_VARIABLE) is not None
        say(f"No plugin is {f'allowed by {PLUGINS_VARIABLE}' if restricted else 'installed'}.")
    return int(bool(conflicts) or any(plugin.error for plugin in loaded))


@plugins_app.command()
def check(
    name: Annotated[
        str, typer.Argument(help="A distribution, entry point, spec, checkpoint name, or path of a checkpoint.")
    ],
    device: Annotated[str, typer.Option("--device", help="Where the engine runs: auto, cuda or cpu.")] = "auto",
) -> None:
    """Run the conformance kit on the model families of that name.

    A tiny random model is built in transformers and compared: hidden states after every layer, logits, greedy tokens,
    and the tokens of every way to compute them. Of a checkpoint the names and shapes of its tensors are compared with
    the model's. The exit code is 1 if a family is not right.
    """
    from tritonllm.conformance.subjects import specs_named

    if device not in ("auto", "cuda", "cpu"):
        raise typer.BadParameter("must be auto, cuda or cpu", param_hint="--device")
    specs_named(name)  # an unknown name is an error of this command, not of pytest
    if importlib.util.find_spec("pytest") is None:
        raise PluginError("The conformance kit runs in pytest: pip install 'tritonllm-engine[testing]'.")
    import pytest

    plugin = "tritonllm.conformance.plugin"
    options = ["-p", plugin, "-p", "no:cacheprovider", "--pyargs", "tritonllm.conformance", "-v", "--no-header"]
    options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    # The command is the same in every folder: what pytest is told in a project of the user is for that project.
    options += ["-c", os.devnull, "--rootdir", os.curdir]
    # In one word with its option, or pytest would look for a configuration file where a checkpoint lies.
    code = pytest.main([*options, f"--tritonllm-model={name}", f"--tritonllm-device={device}"])
    raise typer.Exit(int(code != 0))


@plugins_app.command()
def new(
    name: Annotated[str, typer.Argument(help="Of the family; the folder, entry point and spec are called the same.")],
) -> None:
    """Write a plugin to begin with into a folder of its name: a package with a model that works, and its test."""
    from tritonllm.plugin_scaffold import class_prefix, write_plugin
    from tritonllm.registry import default_registry

    architecture = f"{class_prefix(name)}ForCausalLM"
    taken = {
        served: owner
        for owner, spec in default_registry().specs()
        for served in (spec.name, *spec.checkpoints, *spec.architectures)
    }
    for wanted in (name, architecture):
        if wanted in taken:
            raise PluginError(f"{wanted!r} belongs to a family of {taken[wanted]}: choose another name.")
    folder = write_plugin(name, Path.cwd())
    files = sorted(str(file.relative_to(folder.parent)) for file in folder.rglob("*") if file.is_file())
    typer.echo("\n".join(files))
    say(f"Next: pip install -e ./{name} && tritonllm plugins check {name}")


def _names(plugin: Plugin, field: str) -> list[str]:
    return list(dict.fromkeys(name for spec in plugin.specs for name in getattr(spec, field)))


def _as_json(plugin: Plugin, conflicts: list[str]) -> dict[str, Any]:
    return {
        **dataclasses.asdict(plugin),
        "checkpoints": _names(plugin, "checkpoints"),
        "architectures": _names(plugin, "architectures"),
        "conflicts": [conflict for conflict in conflicts if plugin.owner in conflict],
    }


def _described(plugin: Plugin) -> str:
    lines = [f"{plugin.name} = {plugin.value}  from {plugin.owner}  ({plugin.seconds:.2f} s)"]
    if plugin.error:
        lines.append(f"  failed: {plugin.error}")
    for spec in plugin.specs:
        lines.append(f"  {spec.name}")
        if spec.checkpoints:
            lines.append(f"    checkpoints: {', '.join(spec.checkpoints)}")
        if spec.architectures:
            lines.append(f"    architectures: {', '.join(spec.architectures)}")
    if plugin.imports_torch:
        lines.append("  slow: its module imports torch, and so does every listing")
    return "\n".join(lines)
