"""Which model class serves which checkpoint: plugin discovery and name resolution.

Resolution of a checkpoint, each step ending the search:

1. specs added in this process with `ModelRegistry.add`;
2. entry points whose own name is the checkpoint's key: only these plugins are imported;
3. the `checkpoints` of every built-in and every plugin;
4. the Hugging Face `architectures` of its config.json, in their order, specs of this process first;
5. otherwise `UnknownModelError`, which also names every plugin that failed.

The outcome never depends on the order of discovery: two claimants of one name are an error unless one of them lists
the other's spec name in `overrides`. A plugin that fails is skipped with one warning and never disturbs the others;
plugin authors turn that warning into an error with `python -W error::UserWarning`.

The environment variable TRITONLLM_PLUGINS restricts discovery to a comma-separated list of distribution or
entry-point names; empty, it turns plugins off. Built-ins always stay.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import os
import re
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import pluggy

import tritonllm.models
from tritonllm import hookspecs
from tritonllm.errors import DuplicateModelError, PluginError, UnknownModelError
from tritonllm.hookspecs import PROJECT, ModelSpec

BUILTIN = "tritonllm (built-in)"
IN_PROCESS = "this process"
PLUGINS_VARIABLE = "TRITONLLM_PLUGINS"

_QUANTIZATION = re.compile(
    r"[.-](UD-)?(I?Q\d+(_[A-Z0-9]+)*|TQ\d+_\d+|MXFP4(_MOE)?|BF16|F16|F32|FP16|FP32)$", re.IGNORECASE
)


def checkpoint_keys(name_or_path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The names under which a checkpoint is looked up, most specific first.

    One name for a folder, a hub id or a folder of the hub's cache; for a `.gguf` file its stem, and its stem without
    the quantization suffix.
    """
    path = os.fspath(name_or_path).replace("\\", "/").rstrip("/")
    parts = [part for part in path.split("/") if part != "."]
    if not parts or parts[-1] == "..":
        parts = os.path.abspath(path or "/").split("/")
    name = parts[-1]
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        name = parts[-3]
    if name.startswith("models--"):
        return (name.split("--")[-1],)
    if name.lower().endswith(".gguf"):
        stem = name[: -len(".gguf")]
        return tuple(dict.fromkeys((stem, _QUANTIZATION.sub("", stem))))
    return (name,)


def checkpoint_key(name_or_path: str | os.PathLike[str]) -> str:
    """The checkpoint's name: "Qwen3-0.6B" for "Qwen/Qwen3-0.6B", for a local folder and for the hub's cache folder."""
    return checkpoint_keys(name_or_path)[-1]


def load_object(reference: str) -> Any:
    """Import what "package.module:Name" names.

    Raises:
        PluginError: the module cannot be imported or has no such name.
    """
    module_name, _, qualified_name = reference.partition(":")
    try:
        return functools.reduce(getattr, qualified_name.split("."), importlib.import_module(module_name))
    except (Exception, SystemExit) as error:
        raise PluginError(f"{reference!r} cannot be loaded: {_reason(error)}") from error


def load_model_class(spec: ModelSpec) -> Any:
    """Import the model class of a spec.

    Raises:
        PluginError: it cannot be imported, is no class, or lacks a method that the engine calls.
    """
    model_class = load_object(spec.model)
    if not isinstance(model_class, type):
        raise PluginError(f"Model {spec.name!r}: {spec.model!r} is no class.")
    for method in ("forward", "compute_logits"):
        if not callable(getattr(model_class, method, None)):
            raise PluginError(f"Model {spec.name!r}: class {spec.model!r} has no method {method!r}.")
    return model_class


@dataclasses.dataclass(frozen=True)
class Plugin:
    """What loading one entry point gave.

    Fields:
        name, value: the entry point, as in `name = "value"`.
        distribution: name and version of the package it belongs to.
        specs: the models it registered; empty if it failed.
        error: one sentence on why it was skipped, or None.
        seconds: time that importing and registering took.
        imports_torch: its import was the first to pull torch into the process, which makes every listing slow.
    """

    name: str
    value: str
    distribution: str
    specs: tuple[ModelSpec, ...] = ()
    error: str | None = None
    seconds: float = 0.0
    imports_torch: bool = False


@dataclasses.dataclass(frozen=True)
class _Claim:
    spec: ModelSpec
    owner: str


class ModelRegistry:
    """The models known to one process: built-ins, plugins, and what was added by hand.

    Args:
        entry_points: the plugins to consider; None discovers the installed ones, as TRITONLLM_PLUGINS allows.
    """

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._specs_by_plugin: dict[str, tuple[ModelSpec, ...]] = {}
        self._plugins: dict[tuple[str, str, str], Plugin] = {}
        self._added: dict[str, ModelSpec] = {}
        self._builtins = [_Claim(spec, BUILTIN) for spec in self._collect(tritonllm.models, tritonllm.models.__name__)]
        found = _discover() if entry_points is None else entry_points
        self.entry_points = tuple(sorted(found, key=lambda point: (_distribution(point), point.name, point.value)))

    def add(self, spec: ModelSpec) -> None:
        """Register a spec by hand, in front of built-ins and plugins. A spec of the same name is replaced."""
        if not isinstance(spec, ModelSpec):
            raise PluginError(f"Only a ModelSpec can be added, got {spec!r}.")
        self._added[spec.name] = spec

    def resolve(self, name_or_path: str | os.PathLike[str], architectures: Sequence[str] = ()) -> ModelSpec:
        """Find the model that serves a checkpoint.

        Args:
            name_or_path: hub id, folder, cache folder or `.gguf` file.
            architectures: "architectures" of its config.json.

        Raises:
            UnknownModelError: nothing serves it.
            DuplicateModelError: two plugins claim the same name and neither overrides the other.
        """
        keys = checkpoint_keys(name_or_path)
        for candidates in (self._added_claims, self._named_claims, self._all_claims):
            for key in keys:
                if spec := _only_claim(key, candidates(key)):
                    return spec
        for architecture in architectures:
            for claims in (self._added_claims(), self._all_claims()):
                claims = [claim for claim in claims if architecture in claim.spec.architectures]
                if spec := _only_claim(architecture, claims):
                    return spec
        raise UnknownModelError(self._unknown_message(keys, architectures))

    def plugins(self) -> list[Plugin]:
        """Load every plugin, each by itself, and report on them in a fixed order."""
        return [self._load(point) for point in self.entry_points]

    def specs(self) -> list[tuple[str, ModelSpec]]:
        """Every known model with its owner: this process, the built-ins, then the plugins' distributions."""
        return [(claim.owner, claim.spec) for claim in (*self._added_claims(), *self._all_claims())]

    def _added_claims(self, key: str | None = None) -> list[_Claim]:
        return _serving(key, [_Claim(spec, IN_PROCESS) for spec in self._added.values()])

    def _named_claims(self, key: str) -> list[_Claim]:
        """Claims of the plugins whose entry point bears the name itself, and of a built-in they would replace."""
        claims: list[_Claim] = []
        for plugin in [self._load(point) for point in self.entry_points if point.name == key]:
            plugin_claims = [_Claim(spec, plugin.distribution) for spec in plugin.specs]
            # An entry point named like the checkpoint need not repeat the name in its only spec.
            claims += plugin_claims if len(plugin_claims) == 1 else _serving(key, plugin_claims)
        return claims + _serving(key, self._builtins) if claims else []

    def _all_claims(self, key: str | None = None) -> list[_Claim]:
        loaded = [_Claim(spec, plugin.distribution) for plugin in self.plugins() for spec in plugin.specs]
        return _serving(key, list(dict.fromkeys([*self._builtins, *loaded])))

    def _load(self, point: importlib.metadata.EntryPoint) -> Plugin:
        # Entry points of two distributions compare equal if name and value are, hence a key with the distribution.
        identity = (_distribution(point), point.name, point.value)
        if identity in self._plugins:
            return self._plugins[identity]
        had_torch = "torch" in sys.modules
        start = time.perf_counter()
        plugin = Plugin(point.name, point.value, _distribution(point))
        try:
            plugin = dataclasses.replace(
                plugin, specs=self._collect(point.load(), f"{plugin.distribution}: {point.name}")
            )
        except (Exception, SystemExit) as error:
            plugin = dataclasses.replace(plugin, error=_reason(error))
        plugin = dataclasses.replace(
            plugin,
            seconds=time.perf_counter() - start,
            imports_torch=not had_torch and "torch" in sys.modules,
        )
        self._plugins[identity] = plugin
        if plugin.error:
            warnings.warn(f"{_failure(plugin)}; it is skipped.", UserWarning, stacklevel=2)
        return plugin

    def _collect(self, plugin: object, name: str) -> tuple[ModelSpec, ...]:
        """Register one plugin alone and return its specs; on any failure it leaves no trace in the manager."""
        known_name = self._manager.get_name(plugin)
        if known_name is not None:  # a module behind a second entry-point name
            return self._specs_by_plugin[known_name]
        specs: list[ModelSpec] = []

        def register(spec: ModelSpec) -> None:
            if not isinstance(spec, ModelSpec):
                raise PluginError(f"register() takes a ModelSpec, got {spec!r}.")
            specs.append(spec)

        try:
            self._manager.register(plugin, name)
            # Pending hooks are blamed on the whole manager: checking after each plugin blames the right one.
            self._manager.check_pending()
            others = [other for _, other in self._manager.list_name_plugin() if other is not plugin]
            self._manager.subset_hook_caller("tritonllm_register_models", others)(register=register)
            if not specs:
                raise PluginError("it registers no model: is tritonllm_register_models marked with @hookimpl?")
        except BaseException:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            raise
        self._specs_by_plugin[name] = tuple(specs)
        return tuple(specs)

    def _unknown_message(self, keys: Sequence[str], architectures: Sequence[str]) -> str:
        specs = [spec for _, spec in self.specs()]
        checkpoints = sorted({name for spec in specs for name in spec.checkpoints})
        known = sorted({name for spec in specs for name in spec.architectures})
        by_folded = {name.casefold(): name for name in (*known, *checkpoints)}
        wanted = [name.casefold() for name in (*keys, *architectures)]
        close = [by_folded[name] for word in wanted for name in difflib.get_close_matches(word, by_folded)]
        lines = [
            f"No model serves checkpoint {keys[-1]!r} (architectures: {', '.join(architectures) or 'none given'}); "
            "install a plugin that does, or add a ModelSpec to the registry."
        ]
        if close:
            lines.append(f"Close matches: {', '.join(dict.fromkeys(close))}.")
        lines.append(f"Known architectures: {', '.join(known)}.")
        lines.append(f"Known checkpoints: {', '.join(checkpoints)}.")
        lines.extend(f"{_failure(plugin)}." for plugin in self.plugins() if plugin.error)
        return "\n".join(lines)


@functools.cache
def default_registry() -> ModelRegistry:
    """The registry of this process, made at first use from the installed plugins."""
    return ModelRegistry()


def _discover() -> list[importlib.metadata.EntryPoint]:
    # Our own entry points only advertise the built-ins, which need no metadata to be found.
    points = [
        point
        for point in importlib.metadata.entry_points(group=PROJECT)
        if point.value.partition(":")[0] != tritonllm.models.__name__
    ]
    variable = os.environ.get(PLUGINS_VARIABLE)
    if variable is None:
        return points
    allowed = {_canonical(name) for name in variable.split(",") if name.strip()}
    chosen = [(point, {_canonical(point.name), _canonical(_distribution_name(point))} & allowed) for point in points]
    absent = allowed.difference(*(names for _, names in chosen))
    if absent:
        warnings.warn(f"{PLUGINS_VARIABLE} names no installed plugin: {', '.join(sorted(absent))}.", stacklevel=2)
    return [point for point, names in chosen if names]


def _serving(key: str | None, claims: list[_Claim]) -> list[_Claim]:
    return claims if key is None else [claim for claim in claims if key in claim.spec.checkpoints]


def _only_claim(name: str, claims: list[_Claim]) -> ModelSpec | None:
    """The one claim that is left after overrides, or None if there was no claim at all."""
    overridden = {
        claim for claim in claims for other in claims if other is not claim and claim.spec.name in other.spec.overrides
    }
    left = [claim for claim in claims if claim not in overridden]
    if len(left) == 1:
        return left[0].spec
    if not claims:
        return None
    owners = sorted(f"{claim.spec.name!r} of {claim.owner}" for claim in left or claims)
    raise DuplicateModelError(
        f"{name!r} is claimed by {' and by '.join(owners)}: uninstall one, leave it out with {PLUGINS_VARIABLE}, "
        "or let one list the other's name in `overrides`."
    )


def _failure(plugin: Plugin) -> str:
    return f"Plugin {plugin.name!r} of {plugin.distribution} failed: {plugin.error}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".: ")


def _distribution_name(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown distribution"


def _distribution(point: importlib.metadata.EntryPoint) -> str:
    return f"{_distribution_name(point)} {point.dist.version}" if point.dist is not None else _distribution_name(point)


def _canonical(name: str) -> str:
    """A distribution name in the normal form of PEP 503."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
