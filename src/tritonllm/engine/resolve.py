"""From a configuration to everything that is known before memory is taken: model class, model config, checkpoint."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, cast

import torch
from torch import nn

from tritonllm.checkpoint_names import checkpoint_key
from tritonllm.config import (
    EngineConfig,
    ModelConfig,
    resolve_dtype,
    resolve_max_model_length,
    resolve_model_config,
)
from tritonllm.config.hf import read_architectures
from tritonllm.engine.launch_place import launch_place
from tritonllm.errors import ConfigError, PluginError, UnsupportedModelError
from tritonllm.hookspecs import ModelSpec
from tritonllm.kernels.launch import interpreting
from tritonllm.kernels.tuning import named_tuning
from tritonllm.models.protocol import CausalLM
from tritonllm.models.tensor_parallel import TPGroup, check_world_size
from tritonllm.registry import check_ranks_can_import, default_registry, load_model_class, load_object
from tritonllm.weights import Checkpoint, dummy_weights, load_weights, open_checkpoint

logger = logging.getLogger("tritonllm")
_default_dtype_lock = threading.Lock()


@dataclass(frozen=True)
class ResolvedModel:
    """What an engine configuration means.

    Attributes:
        engine: the configuration with `max_model_length`, `dtype` and `device` decided.
        spec: the model family.
        config: the model.
        checkpoint: where weights and tokenizer come from, None for dummy weights.
        tokenizer: a transformers tokenizer, None for dummy weights and for a checkpoint without one.
        device: where the model runs.
    """

    engine: EngineConfig
    spec: ModelSpec
    config: ModelConfig
    checkpoint: Checkpoint | None
    tokenizer: Any
    device: torch.device


def resolve_model(config: EngineConfig, *, spec: ModelSpec | None = None, recorded: bool = False) -> ResolvedModel:
    """Find the checkpoint, its family and its configuration; nothing is allocated.

    Args:
        config: the engine's.
        spec: the family to use, whatever the checkpoint's name and architecture; None looks it up.
        recorded: resolve it as where there is a GPU, for a run on meta tensors in a recording; without a tokenizer.

    Raises:
        CheckpointError: there is no such checkpoint.
        UnknownModelError: no family serves it.
        PluginError: the spec is no ModelSpec, its model class cannot be imported, or not by the ranks that are asked
            for, or its reader of config.json returns no ModelConfig.
        ConfigError: the configuration contradicts the checkpoint, or asks for what cannot be computed or for more ranks
            than the model or the machine allows; or `TRITONLLM_TUNING` names a file that is no tuning table.
    """
    if spec is not None and not isinstance(spec, ModelSpec):
        raise PluginError(f"spec={spec!r} is no ModelSpec: make one, whose model is 'package.module:Class'.")
    named_tuning()  # a wrong one is refused now, not in the first step
    checkpoint, tokenizer = None, None
    if config.load_format == "dummy":
        hf_config = _shipped_shape(config.model_name_or_path)
        if config.tokenizer is not None and not recorded:
            from tritonllm.weights.checkpoint import load_tokenizer

            tokenizer = load_tokenizer(config.tokenizer)
    else:
        checkpoint = open_checkpoint(config.model_name_or_path, revision=config.revision)
        hf_config = checkpoint.config
    if spec is None:
        spec = _find_spec(config.model_name_or_path, checkpoint, read_architectures(hf_config or {}))
    if checkpoint is not None and not recorded:
        tokenizer = checkpoint.load_tokenizer(config.tokenizer)
    model = resolve_model_config(
        config,
        hf_config,
        reader=_reader(spec),
        generation_config=checkpoint.generation_config if checkpoint is not None else None,
        tokenizer_eos=getattr(tokenizer, "eos_token_id", None),
    )
    check_world_size(model, config.world_size)
    load_model_class(spec)
    if config.world_size > 1:
        check_ranks_can_import(spec)
    device = "cuda" if recorded else _device(config)
    length = resolve_max_model_length(config, model)
    model = model.for_length(length)
    engine = config.replace(
        max_model_length=length,
        dtype=resolve_dtype(config, model, device),
        device=device,
    )
    return ResolvedModel(engine, spec, model, checkpoint, tokenizer, torch.device("meta" if recorded else device))


def build_model(resolved: ResolvedModel, tp: TPGroup) -> CausalLM:
    """Make the model on its device and fill every parameter, but for meta tensors.

    Raises:
        PluginError: the class is no torch.nn.Module.
        CheckpointError: the weights do not fit the model; all names are listed.
    """
    engine = resolved.engine
    model_class = load_model_class(resolved.spec)
    with resolved.device, _default_dtype(getattr(torch, engine.dtype)):
        model: nn.Module = model_class(resolved.config, tp)
    if not isinstance(model, nn.Module):
        raise PluginError(f"Model {resolved.spec.name!r}: {resolved.spec.model!r} is no torch.nn.Module: subclass it.")
    if resolved.device.type == "meta":
        return cast(CausalLM, model.eval())
    if resolved.checkpoint is None:
        dummy_weights(model, engine.seed, tp.check)
    else:
        load_weights(model, _checked(resolved.checkpoint.tensors(), tp))
    return cast(CausalLM, model.eval())


def _checked(tensors: Iterator[tuple[str, torch.Tensor]], tp: TPGroup) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, as long as no rank is lost: loading may take minutes."""
    for name, tensor in tensors:
        tp.check()
        yield name, tensor
        del tensor  # or it would live on while the next is read


def _reader(spec: ModelSpec) -> Callable[[Mapping[str, Any]], ModelConfig]:
    """From a config.json to the family's `ModelConfig`, and to nothing else."""
    if spec.config is None:
        return ModelConfig.from_hf_dict
    read = load_object(spec.config)

    def read_checked(config: Mapping[str, Any]) -> ModelConfig:
        model = read(config)
        if not isinstance(model, ModelConfig):
            raise PluginError(f"Model {spec.name!r}: {spec.config!r} must return a ModelConfig, got {type(model)}.")
        return model

    return read_checked


def _find_spec(name: str, checkpoint: Checkpoint | None, architectures: Sequence[str]) -> ModelSpec:
    """The name decides first, the architecture only where nobody claims the name."""
    spec = default_registry().resolve(name if checkpoint is None else checkpoint.path, architectures)
    _refuse_misnamed(name, spec, architectures)
    return spec


def _refuse_misnamed(name: str, spec: ModelSpec, architectures: Sequence[str]) -> None:
    """A checkpoint that bears the name of one family and the architecture of another would be computed wrongly."""
    if architectures and spec.architectures and not set(architectures) & set(spec.architectures):
        raise UnsupportedModelError(
            f"{name!r} has a name that model {spec.name!r} serves, but its config.json says "
            f"architectures={list(architectures)}, not {list(spec.architectures)}: rename the checkpoint."
        )


def _device(config: EngineConfig) -> str:
    device = _available_device(config)
    place = launch_place(config.world_size)
    ranks_here = config.world_size if place is None else place.local_size
    if device == "cuda" and ranks_here > max(1, torch.cuda.device_count()):
        raise ConfigError(
            f"world_size={config.world_size} needs {ranks_here} GPUs on this host, but torch sees "
            f"{torch.cuda.device_count()}: lower it."
        )
    return device


def _available_device(config: EngineConfig) -> str:
    if config.device != "auto":
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device='cuda' was asked for, but torch sees no CUDA device; use device='cpu' or 'auto'")
        return config.device
    if torch.cuda.is_available() and not interpreting():
        return "cuda"
    backend = "the Triton kernels run in the interpreter" if interpreting() else "the PyTorch references run instead"
    logger.warning("no CUDA device is in use: %s, which is slow", backend)
    return "cpu"


def _shipped_shape(name: str) -> dict[str, Any] | None:
    """The config.json-like shape that the package ships under a checkpoint's name, if any."""
    # Looked up in the listing, since the file system refuses some names, such as very long ones.
    shapes = {file.name: file for file in (resources.files("tritonllm.bench") / "configs").iterdir()}
    file = shapes.get(f"{checkpoint_key(name)}.json")
    return json.loads(file.read_text()) if file else None


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters made inside have this dtype. The setting is torch's and process-wide, so one thread at a time."""
    with _default_dtype_lock:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
