"""Random checkpoints of a few hundred kilobytes, in the shapes on which engines stumble."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tritonllm.testing.tiny_tokenizer import tiny_tokenizer

HEAD_SHAPES: dict[str, tuple[int, int, int]] = {
    "4/4x32": (4, 4, 32),
    "4/2x32": (4, 2, 32),
    "9/3x64": (9, 3, 64),
    "12/2x64": (12, 2, 64),
    "28/4x32": (28, 4, 32),
    "8/1x80": (8, 1, 80),
    "4/2x96": (4, 2, 96),
    "4/2x128": (4, 2, 128),
    "2/1x256": (2, 1, 256),
}
"""Query heads / key-value heads x head dimension: multi-head, grouped, multi-query, and no powers of 2."""

ROPE_RULES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
"""`rope_scaling` of a config.json; the original lengths are short, so that short prompts already leave them."""

_FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Of families that are never without a window: it is in the first of two layers, and short prompts outgrow it."""

_LOGIT_SIZE = 4.0


def tiny_hf_config(family: str, *, heads: str = "4/2x32", rope: str = "default", **overrides: Any) -> Any:
    """A transformers config of two layers and 512 ids, whose hidden size is not the size of its heads taken together.

    Args:
        family: model type as transformers names it: "llama", "qwen3", "gemma2", or another.
        heads: one of `HEAD_SHAPES`.
        rope: one of `ROPE_RULES`.
        overrides: fields of the config that shall differ.
    """
    from transformers import AutoConfig

    num_heads, num_kv_heads, head_dim = HEAD_SHAPES[heads]
    step = math.lcm(num_heads, 16)  # transformers wants the heads to divide it
    fields: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": -(-128 // step) * step,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rope_scaling": ROPE_RULES[rope],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        **_FAMILY_FIELDS.get(family, {}),
    }
    return AutoConfig.for_model(family, **{**fields, **overrides})


def save_tiny_checkpoint(
    hf_config: Any,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tokenizer: bool = True,
    shards: int = 1,
) -> Any:
    """Write a checkpoint of random weights as transformers would, and return the transformers model, on the CPU.

    Weights are of a size that makes every part of the model matter and the best token stand out, so that greedy
    tokens can be compared one by one: a model with transformers' own small initialisation hardly attends to anything.

    Args:
        hf_config: a transformers config of a causal language model; not changed.
        folder: made if it is not there.
        dtype: of the stored weights and of the model returned.
        seed: the same seed gives the same weights.
        tokenizer: whether to add a `tiny_tokenizer`.
        shards: safetensors files to spread the weights over, about that many.
    """
    from transformers import AutoModelForCausalLM

    folder = Path(folder)
    # Through a copy: building a model writes to its config. Eager attention: by default transformers 5.17 has PyTorch
    # compute Gemma 2's, which leaves out the bound on scores.
    copied = type(hf_config).from_dict(hf_config.to_dict())
    model = AutoModelForCausalLM.from_config(copied, attn_implementation="eager")
    randomize_weights(model, seed)
    for parameter in model.parameters():  # and not the buffers: rotary frequencies stay exact
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    sizes = [parameter.numel() * dtype.itemsize for parameter in model.parameters()]
    limit = sum(sizes) + 1 if shards == 1 else max(*sizes, -(-sum(sizes) // shards))
    model.eval().save_pretrained(folder, max_shard_size=limit)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return model


def randomize_weights(model: Any, seed: int) -> None:
    """Fill a transformers model with normal noise.

    Matrices keep the size of what passes through them (standard deviation `fan_in ** -0.5`), embeddings and head are
    such that logits are about `_LOGIT_SIZE`, norm weights and biases move by a fifth off their initial value.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
    ends: set[nn.Parameter] = {module.weight for module in vocabulary}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            else:
                size = _LOGIT_SIZE if parameter in ends else 1.0
                parameter.copy_(size * parameter.shape[-1] ** -0.5 * noise)
