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
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import inspect
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from multiprocessing import parent_process
from typing import Any

import pluggy

import tritonllm.models
from tritonllm import __version__, hookspecs
from tritonllm.checkpoint_names import checkpoint_keys
from tritonllm.errors import DuplicateModelError, PluginError, UnknownModelError
from tritonllm.hookspecs import PROJECT, ModelSpec
from tritonllm.plugin_discovery import PLUGINS_VARIABLE, Plugin, installed_plugins, place, reason

BUILTIN = "tritonllm (built-in)"
IN_PROCESS = "this process"


def load_object(reference: str) -> Any:
    """Import what "package.module:Name" names.

    Raises:
        PluginError: the module cannot be imported or has no such name.
    """
    module_name, _, qualified_name = reference.partition(":")
    try:
        return functools.reduce(getattr, qualified_name.split("."), importlib.import_module(module_name))
    except (Exception, SystemExit) as error:
        hint = ""
        if module_name == "__main__" and parent_process() is not None:
            hint = "; each rank imports the script anew, so the class must stand above the script's main guard"
        raise PluginError(f"{reference!r} cannot be loaded: {reason(error)}{hint}") from error


_CALLED = {
    "__init__": ("config", "tp"),
    "forward": ("input_ids", "positions", "kv_cache", "attn"),
    "compute_logits": ("hidden",),
}
"""Methods of a model class with the arguments that the engine gives, by position."""


def load_model_class(spec: ModelSpec) -> Any:
    """Import the model class of a spec.

    Raises:
        PluginError: it cannot be imported, is no class, or lacks a method as the engine calls it.
    """
    model_class = load_object(spec.model)
    if not isinstance(model_class, type):
        raise PluginError(f"Model {spec.name!r}: {spec.model!r} is no class.")
    for method in _CALLED:
        if not callable(getattr(model_class, method, None)):
            raise PluginError(f"Model {spec.name!r}: class {spec.model!r} has no method {method!r}.")
    for method, arguments in _CALLED.items():
        try:
            inspect.signature(getattr(model_class, method)).bind("self", *arguments)
        except ValueError:  # a function of C, which tells no signature
            continue
        except TypeError as error:
            raise PluginError(
                f"Model {spec.name!r}: {method} of {spec.model!r} must take ({', '.join(arguments)}), but {error}."
            ) from error
    return model_class


@dataclasses.dataclass(frozen=True)
class _Claim:
    spec: ModelSpec
    owner: str

    @property
    def described_owner(self) -> str:
        return f"tritonllm {__version__} (built-in)" if self.owner == BUILTIN else self.owner


class ModelRegistry:
    """The models known to one process: built-ins, plugins, and what was added by hand.

    Several threads may use one; a plugin may, too, while it is being loaded, and finds itself absent.

    Args:
        entry_points: the plugins to consider; None discovers the installed ones, as TRITONLLM_PLUGINS allows.
    """

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._specs_by_plugin: dict[str, tuple[ModelSpec, ...]] = {}
        self._plugins: dict[tuple[str, str, str], Plugin] = {}
        self._added: dict[str, ModelSpec] = {}  # replaced, never changed: other threads may be reading it
        self._builtins = [_Claim(spec, BUILTIN) for spec in self._collect(tritonllm.models, tritonllm.models.__name__)]
        self._lock = threading.RLock()
        self._adding = threading.Lock()
        self._loading: set[tuple[str, str, str]] = set()
        found = installed_plugins() if entry_points is None else entry_points
        self.entry_points = tuple(sorted(found, key=lambda point: (Plugin.of(point).owner, point.name, point.value)))

    def add(self, spec: ModelSpec) -> None:
        """Register a spec by hand, in front of built-ins and plugins. A spec of the same name is replaced."""
        if not isinstance(spec, ModelSpec):
            raise PluginError(f"Only a ModelSpec can be added, got {spec!r}.")
        with self._adding:
            self._added = {**self._added, spec.name: spec}

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

    def conflicts(self) -> list[str]:
        """One sentence for each name that two families claim, neither of which overrides the other; loads all plugins.

        Looking such a name up raises that sentence as a DuplicateModelError, unless an entry point bears the name: then
        only the plugins of such entry points are asked.
        """
        claims = self._all_claims()
        sentences = []
        for field in ("checkpoints", "architectures"):
            for name in dict.fromkeys(name for claim in claims for name in getattr(claim.spec, field)):
                try:
                    _only_claim(name, [claim for claim in claims if name in getattr(claim.spec, field)])
                except DuplicateModelError as error:
                    sentences.append(str(error))
        return sorted(sentences)

    def _added_claims(self, key: str | None = None) -> list[_Claim]:
        return _serving(key, [_Claim(spec, IN_PROCESS) for spec in self._added.values()])

    def _named_claims(self, key: str) -> list[_Claim]:
        """Claims of the plugins whose entry point bears the name itself, and of a built-in they would replace."""
        claims: list[_Claim] = []
        for plugin in [self._load(point) for point in self.entry_points if point.name == key]:
            plugin_claims = [_Claim(spec, plugin.owner) for spec in plugin.specs]
            # An entry point named like the checkpoint need not repeat the name in its only spec.
            claims += plugin_claims if len(plugin_claims) == 1 else _serving(key, plugin_claims)
        return claims + _serving(key, self._builtins) if claims else []

    def _all_claims(self, key: str | None = None) -> list[_Claim]:
        loaded = [_Claim(spec, plugin.owner) for plugin in self.plugins() for spec in plugin.specs]
        return _serving(key, list(dict.fromkeys([*self._builtins, *loaded])))

    def _load(self, point: importlib.metadata.EntryPoint) -> Plugin:
        plugin = Plugin.of(point)
        # Entry points of two distributions compare equal if name and value are, hence a key with the distribution.
        identity = (plugin.owner, plugin.name, plugin.value)
        with self._lock:
            if identity in self._plugins or identity in self._loading:
                return self._plugins.get(identity, plugin)
            self._loading.add(identity)
            try:
                plugin = self._plugins[identity] = self._loaded(plugin, point)
            finally:
                self._loading.remove(identity)
        if plugin.error:
            warnings.warn(f"{plugin.failure}; it is skipped.", UserWarning, stacklevel=2)
        return plugin

    def _loaded(self, plugin: Plugin, point: importlib.metadata.EntryPoint) -> Plugin:
        had_torch = "torch" in sys.modules
        start = time.perf_counter()
        try:
            plugin = dataclasses.replace(plugin, specs=self._collect(point.load(), f"{plugin.owner}: {point.name}"))
        except (Exception, SystemExit) as error:
            plugin = dataclasses.replace(plugin, error=reason(error) + place(error, plugin.value))
        return dataclasses.replace(
            plugin,
            seconds=time.perf_counter() - start,
            imports_torch=not had_torch and "torch" in sys.modules,
        )

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
                marked = bool(self._manager.get_hookcallers(plugin))
                hint = "call register(ModelSpec(...)) in the hook" if marked else "define it, marked with @hookimpl"
                raise PluginError(f"tritonllm_register_models registers no model: {hint}.")
        except BaseException as error:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            if isinstance(error, pluggy.PluginValidationError):
                last = str(error).splitlines()[-1]
                raise PluginError(f"its one hook must be tritonllm_register_models(register): {last}.") from error
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
            "install a plugin that does, or write one: `tritonllm plugins new NAME` makes its package."
        ]
        if close:
            lines.append(f"Close matches: {', '.join(dict.fromkeys(close))}.")
        lines.append(f"Known architectures: {', '.join(known)}.")
        lines.append(f"Known checkpoints: {', '.join(checkpoints)}.")
        lines.extend(f"{plugin.failure}." for plugin in self.plugins() if plugin.error)
        return "\n".join(lines)


_first_use = threading.RLock()


def default_registry() -> ModelRegistry:
    """The registry of this process, made at first use from the installed plugins."""
    # Threads that come first together must share one, or what some of them register would be lost.
    with _first_use:
        return process_registry()


@functools.cache
def process_registry() -> ModelRegistry:
    """What `default_registry` keeps, which alone calls it; tests see whether it was made, and clear it."""
    return ModelRegistry()


def register(spec: ModelSpec) -> None:
    """Register a model family in this process, in front of built-ins and plugins; for notebooks and scripts.

    A spec of the same name is replaced. An engine sends the spec to its other ranks, which import the class by its
    name: `LLMEngine` refuses several ranks where they cannot, as for a class of a notebook.

    Raises:
        PluginError: it is no ModelSpec.
    """
    default_registry().add(spec)


def check_ranks_can_import(spec: ModelSpec) -> None:
    """Refuse a model class that only this process has.

    Raises:
        PluginError: it is defined in a notebook, at a prompt or in `python -c`, of which no other process knows.
    """
    main = sys.modules.get("__main__")
    if spec.model.partition(":")[0] != "__main__" or getattr(main, "__spec__", None) is not None:
        return
    if not os.path.isfile(getattr(main, "__file__", None) or ""):
        raise PluginError(
            f"Model {spec.name!r}: {spec.model!r} is defined in this session, and the processes of the other ranks "
            "cannot import it: move the class into a module, or use world_size=1."
        )


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
    owners = sorted(f"{claim.spec.name!r} of {claim.described_owner}" for claim in left or claims)
    raise DuplicateModelError(
        f"{name!r} is claimed by {' and by '.join(owners)}: uninstall one, leave it out with {PLUGINS_VARIABLE}, "
        "or let one list the other's name in `overrides`."
    )
