"""One GGUF file as a checkpoint: its tensors under Hugging Face names, dequantized one by one."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritonllm.errors import CheckpointError
from tritonllm.weights.checkpoint import load_tokenizer
from tritonllm.weights.gguf_config import config_from_gguf
from tritonllm.weights.gguf_file import GgufFile

if TYPE_CHECKING:
    import numpy
    import torch

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
IN_CONFIG = "rope_freqs.weight"  # becomes `rope_scaling` of the config

_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<leaf>weight|bias)")


class GgufCheckpoint:
    """A `.gguf` file of the Llama, Qwen2 or Qwen3 architecture. See `Checkpoint` for the attributes.

    Raises:
        CheckpointError: the file is damaged, or the optional `gguf` package is not installed.
        UnsupportedModelError: another architecture, or a value that changes the mathematics.
    """

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise CheckpointError(f"Reading {path} needs the gguf package: pip install 'tritonllm-engine[gguf]'.")
        self.path = path
        self._file = GgufFile(path)
        self.config = config_from_gguf(self._file)
        self.generation_config: dict[str, Any] = {}

    def __reduce__(self) -> tuple[type[GgufCheckpoint], tuple[Path]]:
        return GgufCheckpoint, (self.path,)  # another process maps the file anew

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._file.tensors:
            if name != IN_CONFIG:
                yield _hugging_face_name(name), self._tensor(name)

    def _tensor(self, name: str) -> torch.Tensor:
        import torch

        values = self._file.read(name)
        heads = {"attn_q": self.config["num_attention_heads"], "attn_k": self.config["num_key_value_heads"]}
        match = _TENSOR.fullmatch(name)
        if match and match["part"] in heads and self.config["model_type"] == "llama":
            values = _half_by_half(values, heads[match["part"]])
        return torch.from_numpy(values)

    def load_tokenizer(self, tokenizer: str | None = None) -> Any:
        if tokenizer is not None:
            return load_tokenizer(tokenizer)
        return load_tokenizer(str(self.path.parent), gguf_file=self.path.name)


def _hugging_face_name(name: str) -> str:
    """The name on the hub; a name that is not known stays, so that the loader can report it."""
    match = _TENSOR.fullmatch(name)
    if match is None or match["part"] not in NAMES:
        return name
    layer = f"model.layers.{match['layer']}." if match["layer"] else ""
    return f"{layer}{NAMES[match['part']]}.{match['leaf']}"


def _half_by_half(values: numpy.ndarray, num_heads: int) -> numpy.ndarray:
    """Reorder the rows of each head from GGUF's rotary pairs (0, 1), (2, 3), ... to Hugging Face's (i, i + D/2).

    Only files of the llama architecture are stored in pairs. Rows `[num_heads * D, ...]`, weights and biases alike.
    """
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
