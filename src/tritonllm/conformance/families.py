"""Which model families a name means: on the command line, and to the kit."""

from __future__ import annotations

import json
from pathlib import Path

from tritonllm.config.hf import read_architectures
from tritonllm.errors import CheckpointError, PluginError
from tritonllm.hookspecs import ModelSpec
from tritonllm.plugin_discovery import OWN_DISTRIBUTION, canonical_name
from tritonllm.registry import BUILTIN, ModelRegistry, default_registry, load_object


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

    A folder with a checkpoint, a distribution (all its families), an entry point (all of its), a spec, and last a
    checkpoint or an architecture, as an engine would look them up.

    Args:
        name: any of these.
        registry: what is known; None is this process's.

    Raises:
        PluginError: the plugin of that name failed.
        CheckpointError: the folder's config.json cannot be read.
        UnknownModelError, DuplicateModelError: as of `ModelRegistry.resolve`.
    """
    registry = default_registry() if registry is None else registry
    config = Path(name) / "config.json"
    if config.is_file():
        return [registry.resolve(name, _architectures(config))]
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


def _architectures(config: Path) -> tuple[str, ...]:
    try:
        return read_architectures(json.loads(config.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{config} is not readable as a config.json: {error}.") from error
