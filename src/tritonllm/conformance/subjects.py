"""What to test: which model families a name means, on the command line and to the kit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from tritonllm.config.hf import read_architectures
from tritonllm.errors import CheckpointError, PluginError
from tritonllm.hookspecs import ModelSpec
from tritonllm.plugin_discovery import OWN_DISTRIBUTION, canonical_name
from tritonllm.registry import BUILTIN, ModelRegistry, default_registry, load_object


@dataclasses.dataclass(frozen=True)
class Subject:
    """A family to test.

    Attributes:
        spec: the family.
        checkpoint: a folder or `.gguf` file whose tensors should be those of the model, or None.
    """

    spec: ModelSpec
    checkpoint: str | None = None


def subjects(names: Sequence[str], references: Sequence[str] = ()) -> list[Subject]:
    """What `--tritonllm-model` and `--tritonllm-spec` name, each once.

    A spec that is given outright is looked up nowhere; then a name is only asked for a checkpoint.

    Raises:
        PluginError, CheckpointError, UnknownModelError, DuplicateModelError: as of `load_spec` and `specs_named`.
    """
    specs = [load_spec(reference) for reference in references]
    paths = [name if _is_checkpoint(name) else None for name in names] or [None]
    if specs:
        found = [Subject(spec, path) for spec in specs for path in paths]
    else:
        found = [Subject(spec, path) for name, path in zip(names, paths, strict=True) for spec in specs_named(name)]
    return list(dict.fromkeys(found))


def load_spec(reference: str) -> ModelSpec:
    """The ModelSpec that "package.module:SPEC" names.

    Raises:
        PluginError: it cannot be imported, or is something else.
    """
    if ":" not in reference:
        raise PluginError(f"A spec is named like 'package.module:SPEC', got {reference!r}.")
    spec = load_object(reference)
    if not isinstance(spec, ModelSpec):
        raise PluginError(f"{reference!r} must be a ModelSpec, got {type(spec).__name__}.")
    return spec


def specs_named(name: str, registry: ModelRegistry | None = None) -> list[ModelSpec]:
    """The families that a name means; the first of these that is there decides.

    A checkpoint's folder or `.gguf` file, a distribution (all its families), an entry point (all of its), a spec, and
    last a checkpoint or an architecture, as an engine would look them up.

    Args:
        name: any of these.
        registry: what is known; None is this process's.

    Raises:
        PluginError: the plugin of that name failed.
        CheckpointError: the folder's config.json cannot be read.
        UnknownModelError, DuplicateModelError: as of `ModelRegistry.resolve`.
    """
    registry = default_registry() if registry is None else registry
    if _is_checkpoint(name):
        return [registry.resolve(name, _architectures(Path(name)))]
    if canonical_name(name) in (OWN_DISTRIBUTION, "tritonllm"):
        return [spec for owner, spec in registry.specs() if owner == BUILTIN]
    plugins = registry.plugins()
    same = [plugin for plugin in plugins if canonical_name(plugin.distribution) == canonical_name(name)]
    same = same or [plugin for plugin in plugins if plugin.name == name]
    if same:
        failures = [plugin.failure for plugin in same if plugin.error]
        if failures:
            raise PluginError(f"{'; '.join(failures)}.")
        return list(dict.fromkeys(spec for plugin in same for spec in plugin.specs))
    bearers = [spec for _, spec in registry.specs() if spec.name == name]
    return list(dict.fromkeys(bearers)) or [registry.resolve(name, [name])]


def _is_checkpoint(name: str) -> bool:
    path = Path(name)
    return (path / "config.json").is_file() or (path.suffix.lower() == ".gguf" and path.is_file())


def _architectures(path: Path) -> tuple[str, ...]:
    if path.is_file():
        from tritonllm.weights import open_checkpoint

        return read_architectures(open_checkpoint(str(path)).config)
    config = path / "config.json"
    try:
        return read_architectures(json.loads(config.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{config} is not readable as a config.json: {error}.") from error
