"""The contract between tritonllm and the packages that add model families to it.

A plugin is a module with one hook implementation, named in the plugin's own `pyproject.toml`:

    [project.entry-points.tritonllm]
    "Toy-1M" = "tritonllm_toy.plugin"

    # tritonllm_toy/plugin.py
    from tritonllm import ModelSpec, hookimpl

    @hookimpl
    def tritonllm_register_models(register):
        register(ModelSpec(name="toy", model="tritonllm_toy.model:ToyForCausalLM", checkpoints=("Toy-1M",)))

Classes and functions are named by strings, so registering and listing models never imports torch, and one resolved
spec can be sent to every rank of a tensor-parallel engine.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pluggy

from tritonllm.errors import PluginError

PROJECT = "tritonllm"
API_VERSION = 1

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """One model family: what it is called, which checkpoints it serves, and where its code is.

    Fields:
        name: label of the family in listings and errors, e.g. "qwen3".
        model: "package.module:Class" of the `torch.nn.Module`.
        checkpoints: exact final path components of the checkpoints served, e.g. ("Qwen3-0.6B",); case matters.
        architectures: Hugging Face class names from config.json, the fallback when no checkpoint name matches.
        config: "package.module:function" from the config.json dict to `ModelConfig`; None means
            `ModelConfig.from_hf_dict`.
        overrides: names of the specs that this one may replace where both claim the same name.
        reference: "package.module:function" returning the tiny transformers config that the conformance tests compare
            with; None means the transformers class named by `architectures[0]`, its config shrunk.
        api: version of this contract that the plugin was written for.

    Raises:
        PluginError: a field is not of the form above.
    """

    name: str
    model: str
    checkpoints: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    config: str | None = None
    overrides: tuple[str, ...] = ()
    reference: str | None = None
    api: int = API_VERSION

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise PluginError(f"ModelSpec.name must be a non-empty string, got {self.name!r}.")
        if self.api != API_VERSION:
            raise PluginError(
                f"ModelSpec {self.name!r} is written for plugin api {self.api!r}, this tritonllm speaks "
                f"{API_VERSION}: install matching versions of the plugin and of tritonllm."
            )
        for field in ("model", "config", "reference"):
            value = getattr(self, field)
            if value is None and field != "model":
                continue
            if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
                raise PluginError(
                    f"ModelSpec {self.name!r}: {field} must be a string like 'package.module:Name', got {value!r}."
                )
        for field in ("checkpoints", "architectures", "overrides"):
            object.__setattr__(self, field, self._names(field))
        if not self.checkpoints and not self.architectures:
            raise PluginError(f"ModelSpec {self.name!r} serves nothing: give it checkpoints or architectures.")
        for checkpoint in self.checkpoints:
            if "/" in checkpoint or "\\" in checkpoint:
                raise PluginError(
                    f"ModelSpec {self.name!r}: a checkpoint is named by its final path component only, "
                    f"got {checkpoint!r}."
                )

    def _names(self, field: str) -> tuple[str, ...]:
        value = getattr(self, field)
        # A lone string is iterable too: ("Toy-1M") without its comma would register six one-letter names.
        if not isinstance(value, (tuple, list)) or not all(isinstance(name, str) and name for name in value):
            raise PluginError(
                f"ModelSpec {self.name!r}: {field} must be a tuple of non-empty strings, got {value!r} "
                "(a tuple of one needs its comma)."
            )
        return tuple(value)


@hookspec
def tritonllm_register_models(register: Callable[[ModelSpec], None]) -> None:
    """Call `register(ModelSpec(...))` once for each model family that the plugin adds.

    It must be cheap and import no torch: it runs whenever models are listed or looked up. Nothing may depend on the
    order in which plugins are called. The parameter takes no default value.
    """
