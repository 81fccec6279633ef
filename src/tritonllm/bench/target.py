"""What a benchmark runs: from the NAME on the command line to an `EngineConfig`."""

from __future__ import annotations

import difflib
import json
import math
import reprlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from tritonllm.checkpoint_names import checkpoint_key
from tritonllm.config import EngineConfig, ModelConfig
from tritonllm.config.hf import read_architectures
from tritonllm.errors import CheckpointError, UnsupportedModelError
from tritonllm.registry import default_registry, load_object


def engine_config(name: str, load_format: str, **keys: Any) -> EngineConfig:
    """The configuration of an engine that runs the model of that name.

    With real weights the engine's own rules find it, and no shipped shape can stand in its way. With dummy weights only
    a shape is needed: that of a folder or `.gguf` file, else the shipped one of that name (with or without its owner),
    else the config.json of that hub id.

    Raises:
        CheckpointError: nothing has that name.
        UnsupportedModelError: the shape cannot be computed, or not with dummy weights.
        ConfigError: a key is wrong.
    """
    if load_format == "dummy":
        if _exists(name):
            return EngineConfig(**_described(name, _read_shape(name)), **keys)
        if checkpoint_key(name) not in shipped_shapes():
            return EngineConfig(**_described(name, _download_shape(name)), **keys)
    return EngineConfig(model_name_or_path=name, load_format=load_format, **keys)


def model_shape(name: str) -> ModelConfig:
    """The shape of that name, found as for dummy weights. torch is not needed.

    Raises:
        CheckpointError: nothing has that name.
        UnsupportedModelError: the shape cannot be computed.
    """
    if _exists(name):
        shape = _read_shape(name)
    elif checkpoint_key(name) in shipped_shapes():
        file = resources.files("tritonllm.bench") / "configs" / f"{checkpoint_key(name)}.json"
        shape = json.loads(file.read_text(encoding="utf-8"))
    else:
        shape = _download_shape(name)
    return _model_of(name, shape)


def norms_heads(name: str, model: ModelConfig) -> bool:
    """Whether the model class that serves a name has a norm on query and key heads, as Qwen3's does."""
    spec = default_registry().resolve(name, model.architectures)
    layer = getattr(load_object(spec.model), "layer_class", None)
    return bool(getattr(layer, "qk_norm", False))


def is_checkpoint(name: str) -> bool:
    """Whether a name is that of a checkpoint at hand, with weights: a folder, a `.gguf` file or a packaged model."""
    from tritonllm.weights.resolve import PACKAGED

    if not _exists(name):
        return name in PACKAGED
    path = Path(name).expanduser()
    return path.is_file() or any(file.suffix in (".safetensors", ".gguf") for file in path.iterdir())


def shipped_shapes() -> list[str]:
    """Names of the shapes that come with the package."""
    files = (resources.files("tritonllm.bench") / "configs").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files)


def _exists(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError):  # too long for the file system, or of an unknown user
        return False


def _read_shape(name: str) -> dict[str, Any]:
    path = Path(name).expanduser()
    if not (path / "config.json").is_file():
        from tritonllm.weights import open_checkpoint

        return dict(open_checkpoint(path).config)
    try:
        shape = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path / 'config.json'} is not readable as JSON: {error}.") from error
    if not isinstance(shape, dict):
        raise CheckpointError(f"{path / 'config.json'} must hold a JSON object, not {type(shape).__name__}.")
    return shape


def _download_shape(name: str) -> dict[str, Any]:
    if name.count("/") != 1 or name.startswith(("/", ".", "~")) or name.endswith("/"):
        shapes = shipped_shapes()
        meant = difflib.get_close_matches(checkpoint_key(name), shapes, n=1)
        hint = f"did you mean {meant[0]!r}?" if meant else f"the shapes are {', '.join(shapes)}."
        what = "is no folder, no shipped shape and no hub id 'owner/name'"
        raise CheckpointError(f"{reprlib.repr(name)} {what}: {hint}")
    from huggingface_hub import hf_hub_download

    try:
        return dict(json.loads(Path(hf_hub_download(name, "config.json")).read_text(encoding="utf-8")))
    except Exception as error:  # the transport below differs between releases of huggingface_hub
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{name!r} is no folder and no shipped shape, and the hub gave no config.json: {reason}"
        ) from error


def _model_of(name: str, shape: Mapping[str, Any]) -> ModelConfig:
    spec = default_registry().resolve(name, read_architectures(shape))
    reader = load_object(spec.config) if spec.config else ModelConfig.from_hf_dict
    model: ModelConfig = reader(shape)
    return model


def _described(name: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    """A shape as the architecture keys that give an engine dummy weights of it.

    The engine gets the name of a checkpoint of the family, since it picks the class by name and shapes come with keys.
    Scaled RoPE becomes plain: other angles, the same work.
    """
    architectures = read_architectures(shape)
    spec = default_registry().resolve(name, architectures)
    model = _model_of(name, shape)
    inexpressible = {
        "o_bias": model.o_bias,
        "rotary_dim": model.rope.rotary_dim != model.head_dim,
        "fields of its own": type(model) is not ModelConfig,
    }
    for field, there in inexpressible.items():
        if there:
            raise UnsupportedModelError(
                f"{name!r} has {field}, which dummy weights cannot be given: measure it with --load-format auto."
            )
    return {
        "model_name_or_path": (*spec.checkpoints, *architectures)[0],
        "load_format": "dummy",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position": model.max_length,
        "base": model.rope.theta,
        "rms_norm_epsilon": model.rms_norm_eps,
        "scale": model.attention_scale * math.sqrt(model.head_dim),
        "qkv_bias": model.qkv_bias,
        "ffn_bias": model.mlp_bias,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
