"""What a user asks of the engine: `EngineConfig`, its defaults, and errors that name the key that was meant."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Any, TypeVar

from tritonllm.config.checks import Rule, check_fields, even, flag, integer, integers, number, one_of, text
from tritonllm.errors import ConfigError

ALIASES = {"max_num_seqs": "max_num_sequences"}

ARCHITECTURE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position",
    "base",
    "rms_norm_epsilon",
    "scale",
    "qkv_bias",
    "ffn_bias",
    "tie_word_embeddings",
)

# Names that other engines and config.json use for a key of ours: closer in meaning than any spelling is.
_FOREIGN_NAMES = {
    "attention_bias": "qkv_bias",
    "disable_custom_all_reduce": "all_reduce",
    "eos_token_id": "eos",
    "gpu_memory_fraction": "gpu_memory_utilization",
    "kv_block_size": "block_size",
    "long_prefill_token_threshold": "max_prefill_tokens_beside_decode",
    "kvcache_block_size": "block_size",
    "max_batch_size": "max_num_sequences",
    "max_model_len": "max_model_length",
    "max_position_embeddings": "max_position",
    "max_seq_len": "max_model_length",
    "max_sequence_length": "max_model_length",
    "mlp_bias": "ffn_bias",
    "model": "model_name_or_path",
    "model_id": "model_name_or_path",
    "model_path": "model_name_or_path",
    "num_attention_heads": "num_heads",
    "num_gpu_blocks": "max_cached_blocks",
    "num_gpu_blocks_override": "max_cached_blocks",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_kv_heads",
    "num_kvcache_blocks": "max_cached_blocks",
    "page_size": "block_size",
    "rms_norm_eps": "rms_norm_epsilon",
    "rope_theta": "base",
    "softmax_scale": "scale",
    "tensor_parallel_size": "world_size",
    "torch_dtype": "dtype",
    "tp": "world_size",
    "tp_size": "world_size",
}

_RULES: dict[str, Rule] = {
    "model_name_or_path": text(),
    "world_size": integer(1),
    "max_num_sequences": integer(1),
    "max_num_batched_tokens": integer(1),
    "max_prefill_tokens_beside_decode": integer(1),
    "max_num_batch_tokens": integer(1).or_none(),
    "max_cached_blocks": integer(1).or_none(),
    "block_size": integer(1),
    "max_model_length": integer(1).or_none(),
    "eos": Rule(
        "a token id >= 0, a sequence of such ids, or None",
        lambda value: value is None or integer(0, 2**31 - 1).accepts(value) or integers(0, 2**31 - 1).accepts(value),
    ),
    "enforce_eager": flag(),
    "gpu_memory_utilization": number(0, 1, above=True),
    "dtype": one_of("auto", "bfloat16", "float16", "float32"),
    "device": one_of("auto", "cuda", "cpu"),
    "all_reduce": one_of("auto", "nccl"),
    "load_format": one_of("auto", "dummy"),
    "seed": integer(0, 2**64 - 1),
    "revision": text().or_none(),
    "tokenizer": text().or_none(),
    "vocab_size": integer(1).or_none(),
    "hidden_size": integer(1).or_none(),
    "intermediate_size": integer(1).or_none(),
    "num_layers": integer(1).or_none(),
    "num_heads": integer(1).or_none(),
    "num_kv_heads": integer(1).or_none(),
    "head_dim": even().or_none(),
    "max_position": integer(1).or_none(),
    "base": number(0, above=True).or_none(),
    "rms_norm_epsilon": number(0, above=True).or_none(),
    "scale": number(0, above=True).or_none(),
    "qkv_bias": flag().or_none(),
    "ffn_bias": flag().or_none(),
    "tie_word_embeddings": flag().or_none(),
}

_Config = TypeVar("_Config")


def canonical_keys(keys: Mapping[Any, Any]) -> dict[str, Any]:
    """The same keys without aliases.

    Raises:
        ConfigError: an unknown key (names the closest valid one), an alias that contradicts its key, or no model.
    """
    canonical: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for key, value in keys.items():
        name = ALIASES.get(key, key)
        if name not in _RULES:
            raise ConfigError(_unknown_key(key))
        if name in canonical and canonical[name] != value:
            raise ConfigError(
                f"{given_as[name]}={canonical[name]!r} and {key}={value!r} are two names of one key: give one of them."
            )
        canonical[name], given_as[name] = value, key
    if "model_name_or_path" not in canonical:
        raise ConfigError("model_name_or_path is missing: give a Hugging Face model id or the path of a checkpoint.")
    return canonical


def _unknown_key(key: object) -> str:
    if not isinstance(key, str):
        return f"The configuration key {key!r} is not a string."
    valid = [*_RULES, *ALIASES]
    meant = _FOREIGN_NAMES.get(key) or next(iter(difflib.get_close_matches(key.lower(), valid, n=1, cutoff=0.6)), None)
    if meant is None:
        return f"Unknown configuration key {key!r}; the valid keys are {', '.join(sorted(valid))}."
    return f"Unknown configuration key {key!r}: did you mean {meant!r}?"


def _checks_keywords(cls: type[_Config]) -> type[_Config]:
    """Let the generated `__init__` take aliases, and answer an unknown key with the closest valid one."""
    generated = cls.__init__

    @functools.wraps(generated)
    def __init__(self: _Config, model_name_or_path: Any = MISSING, **keys: Any) -> None:
        if model_name_or_path is not MISSING:
            keys["model_name_or_path"] = model_name_or_path
        generated(self, **canonical_keys(keys))

    cls.__init__ = __init__  # type: ignore[assignment]
    return cls


@_checks_keywords
@dataclass(frozen=True)
class EngineConfig:
    """Everything a user can set on an engine: the model, then keywords. Immutable: `replace` gives a changed copy.

    Any bad key or value raises `ConfigError` at construction, before a process starts or memory is taken.
    `max_num_seqs` is an alias of `max_num_sequences`.

    Attributes:
        model_name_or_path: Hugging Face id, local directory or `.gguf` file.
        world_size: number of tensor-parallel ranks, one a GPU, on this host unless torchrun started them; must divide
            the model's heads and `intermediate_size`, and divide its key-value heads or be a multiple of them.
        max_num_sequences: most requests decoded at once.
        max_num_batched_tokens: most tokens computed in one step (the scheduler's budget).
        max_prefill_tokens_beside_decode: most prompt tokens that a step takes while sequences decode, for each prompt
            that waits or is under way: it bounds the gap between the tokens of a stream. `max_num_batched_tokens` holds
            in any case, and from that value on this one limits nothing.
        max_num_batch_tokens: tokens of the warm-up run that measures peak memory; None means the budget.
        max_cached_blocks: blocks in the KV pool; None means measured (GPU) or bounded by host memory (CPU).
        block_size: tokens in one KV block.
        max_model_length: most tokens of one request, prompt and output together. None means all that the checkpoint
            computes exactly: its number of positions, or less where a sliding window or dynamic RoPE ends sooner.
        eos: token id or ids that end a text, added to those the checkpoint names.
        enforce_eager: run every decode step without CUDA graphs.
        gpu_memory_utilization: share of the memory free once the weights are loaded that the engine may take: KV pool,
            activations and graphs.
        dtype: of weights and activations. "auto" is float32 on a CPU, on a GPU the checkpoint's (bfloat16 if dummy).
        device: "auto" is a CUDA device if there is one.
        all_reduce: how sums over ranks on GPUs are made. "auto" goes through the GPUs' memory where all of them are of
            one host and joined by NVLink, for sizes at which that is faster than NCCL; "nccl" never does.
        load_format: "dummy" fills the model with random weights and looks nothing up.
        seed: of dummy weights and of requests that bring no seed.
        revision: branch, tag or commit on the hub.
        tokenizer: id or path of another tokenizer than the checkpoint's.
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, max_position, base,
        rms_norm_epsilon, scale, qkv_bias, ffn_bias, tie_word_embeddings: the architecture. Left out, they come from the
            checkpoint; given, they must agree with it (see `resolve_model_config`); with dummy weights they are the
            whole truth. `base` is RoPE's theta, and `scale` multiplies the softmax scale `head_dim**-0.5`.
    """

    model_name_or_path: str
    _: KW_ONLY
    world_size: int = 1
    max_num_sequences: int = 16
    max_num_batched_tokens: int = 1024
    max_prefill_tokens_beside_decode: int = 512
    max_num_batch_tokens: int | None = None
    max_cached_blocks: int | None = None
    block_size: int = 256
    max_model_length: int | None = None
    eos: int | tuple[int, ...] | None = None
    enforce_eager: bool = False
    gpu_memory_utilization: float = 0.9
    dtype: str = "auto"
    device: str = "auto"
    all_reduce: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    revision: str | None = None
    tokenizer: str | None = None

    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_position: int | None = None
    base: float | None = None
    rms_norm_epsilon: float | None = None
    scale: float | None = None
    qkv_bias: bool | None = None
    ffn_bias: bool | None = None
    tie_word_embeddings: bool | None = None

    def __post_init__(self) -> None:
        for name in ("model_name_or_path", "tokenizer"):
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        if isinstance(self.eos, (list, set, frozenset)):
            object.__setattr__(self, "eos", tuple(self.eos))
        check_fields(self, _RULES, ConfigError)
        if self.max_position is not None and (self.max_model_length or 0) > self.max_position:
            raise ConfigError(
                f"max_model_length={self.max_model_length} is above max_position={self.max_position}: "
                "raise the latter or lower the former."
            )

    @classmethod
    def from_dict(cls, keys: Mapping[str, Any]) -> EngineConfig:
        """Read a plain dict of the keys above; the dict is not changed."""
        if not isinstance(keys, Mapping):
            raise ConfigError(f"The configuration must be a mapping of keys to values, not {type(keys).__name__}.")
        return cls(**canonical_keys(keys))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict that `from_dict` reads back; architecture keys that were not given are left out."""
        keys = {field.name: getattr(self, field.name) for field in fields(self)}
        keys = {name: value for name, value in keys.items() if value is not None or name not in ARCHITECTURE_KEYS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in keys.items()}

    def replace(self, **changes: Any) -> EngineConfig:
        """A copy with some keys changed, checked like a new one."""
        changes = canonical_keys({"model_name_or_path": self.model_name_or_path, **changes})
        return type(self)(**{**self.to_dict(), **changes})

    @property
    def architecture(self) -> dict[str, Any]:
        """The architecture keys that were given."""
        return {name: value for name in ARCHITECTURE_KEYS if (value := getattr(self, name)) is not None}

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """`eos` as a tuple, empty if none was given."""
        if self.eos is None:
            return ()
        return self.eos if isinstance(self.eos, tuple) else (self.eos,)

    @property
    def warm_up_tokens(self) -> int:
        """Tokens of the warm-up run."""
        return self.max_num_batched_tokens if self.max_num_batch_tokens is None else self.max_num_batch_tokens
