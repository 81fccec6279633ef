"""From GGUF metadata to the config.json dict that the same model has on the Hugging Face hub."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

from tritonllm.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from tritonllm.weights.gguf_file import GgufFile

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DTYPES = {0: "float32", 1: "float16"}  # by ggml type; of everything else bfloat16 keeps more than the file holds
STOP_TOKENS = ("eos", "eot", "eom")

# Keys under the architecture's prefix that change the mathematics, with the value at which they change nothing.
NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}

# Llama 3.1 to 3.3 store their rotary scaling only as divisors of the frequencies; these are the parameters behind them.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """Build the dict, in the shape that config.json had before transformers 5.

    Raises:
        UnsupportedModelError: the architecture, or a value that changes the mathematics, is not supported.
        CheckpointError: a value that every such file has is missing.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: general.architecture = {architecture!r} cannot be read from GGUF, only "
            f"{', '.join(ARCHITECTURES)}; use the safetensors checkpoint."
        )
    values = {
        key.removeprefix(f"{architecture}."): _exact(value)
        for key, value in file.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    for key, neutral in NEUTRAL.items():
        if values.get(key, neutral) != neutral:
            raise UnsupportedModelError(f"{file.path}: {architecture}.{key} = {values[key]!r} is not supported.")
    try:
        return _config(file, architecture, values)
    except KeyError as error:
        raise CheckpointError(f"{file.path} lacks {error}, which a {architecture} GGUF file must hold.") from error


def _config(file: GgufFile, architecture: str, values: dict[str, Any]) -> dict[str, Any]:
    tensors = file.tensors
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(values.get(key), list):
            raise UnsupportedModelError(
                f"{file.path}: {architecture}.{key} = {values[key]} differs by layer, which is not supported."
            )
    num_heads = values["attention.head_count"]
    head_dim = values.get("attention.key_length", values["embedding_length"] // num_heads)
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": values["embedding_length"],
        "intermediate_size": values["feed_forward_length"],
        "num_hidden_layers": values["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": values.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": values["context_length"],
        "rms_norm_eps": values["attention.layer_norm_rms_epsilon"],
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": values.get("rope.freq_base", 10000.0),
        "dtype": DTYPES.get(tensors["blk.0.ffn_up.weight"].type_number, "bfloat16"),
    }
    if (value_length := values.get("attention.value_length", head_dim)) != head_dim:
        raise UnsupportedModelError(
            f"{file.path}: attention.value_length = {value_length} differs from key_length = {head_dim}."
        )
    if architecture != "qwen2":  # whose query, key and value always have a bias
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if (window := values.get("attention.sliding_window")) is not None:
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}  # in every layer
    rotary_dim = values.get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if scaling := _rope_scaling(file, values, config["rope_theta"]):
        config["rope_scaling"] = scaling
    ids = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in STOP_TOKENS]
    if stop_ids := list(dict.fromkeys(number for number in ids if number is not None)):
        config["eos_token_id"] = stop_ids
    if (bos := file.metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = bos
    return config


def _rope_scaling(file: GgufFile, values: dict[str, Any], theta: float) -> dict[str, Any] | None:
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear", 1.0))
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise UnsupportedModelError(f"{file.path}: rope.scaling.type = {kind!r} together with rope_freqs.weight.")
        return _llama3_scaling(file, theta)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        if "rope.scaling.original_context_length" in values:
            scaling["original_max_position_embeddings"] = values["rope.scaling.original_context_length"]
        for key in ("beta_fast", "beta_slow"):
            if (value := values.get(f"rope.scaling.yarn_{key}")) is not None:
                scaling[key] = value
        attention_factor = values.get("rope.scaling.yarn_attn_factor", values.get("rope.scaling.attn_factor", 1.0))
        if attention_factor != 1.0:
            # llama.cpp multiplies YaRN's own factor; Hugging Face's attention_factor replaces it.
            scaling["attention_factor"] = attention_factor * (0.1 * math.log(factor) + 1.0)
        return scaling
    raise UnsupportedModelError(f"{file.path}: rope.scaling.type = {kind!r} is not supported, only linear and yarn.")


def _llama3_scaling(file: GgufFile, theta: float) -> dict[str, Any] | None:
    """The "llama3" parameters behind the divisors in `rope_freqs.weight`, checked against every one of them."""
    divisors = file.read("rope_freqs.weight").tolist()
    factor = max(divisors)
    if all(divisor == 1.0 for divisor in divisors):
        return None
    low, high, original = (
        LLAMA3["low_freq_factor"],
        LLAMA3["high_freq_factor"],
        LLAMA3["original_max_position_embeddings"],
    )
    for index, divisor in enumerate(divisors):
        wavelength = 2 * math.pi * theta ** (index / len(divisors))
        blend = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        if not math.isclose(divisor, 1.0 / ((1.0 - blend) / factor + blend), rel_tol=1e-3):
            raise UnsupportedModelError(
                f"{file.path}: rope_freqs.weight[{index}] = {divisor} does not follow the llama3 scaling with "
                f"{LLAMA3}; use the safetensors checkpoint."
            )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _exact(value: Any) -> Any:
    """A float32 as the shortest decimal that means it: 1e-05, which config.json says, not 9.999999747378752e-06."""
    if not isinstance(value, float):
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
