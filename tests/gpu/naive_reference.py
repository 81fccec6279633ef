"""A decoder in plain PyTorch: no cache, no batch, no fusion, in whatever precision is asked for.

What two ways of computing disagree about is judged by this: all text so far goes through it at once, in float64 to
judge float32 and in float32 to judge bfloat16.
"""

from __future__ import annotations

import torch

from tritonllm.config import ModelConfig
from tritonllm.models.rope import rope_table
from tritonllm.weights import open_checkpoint
from tritonllm.weights.dummy import dummy_tensor

QUERY_ROWS = 1024


class NaiveDecoder:
    """Llama, and what differs from it in biases and per-head norms alone.

    Args:
        config: the model.
        tensors: by checkpoint name, in any dtype; an untied head is "lm_head.weight".
        weights_dtype: what weights are rounded to first, the dtype of the engine that is judged.
        dtype: of every operation.
        device: of every tensor.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, torch.Tensor],
        weights_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.tensors = {name: tensor.to(device).to(weights_dtype).to(dtype) for name, tensor in tensors.items()}
        self.cos_sin = rope_table(config.rope, config.max_position, device).to(dtype)

    @torch.inference_mode()
    def logits(self, token_ids: list[int], num_last: int) -> torch.Tensor:
        """`[num_last, vocabulary]` of the last tokens of a text."""
        hidden = self.tensors["model.embed_tokens.weight"][torch.tensor(token_ids, device=self.device)]
        for index in range(self.config.num_layers):
            layer = f"model.layers.{index}"
            hidden = hidden + self._attention(f"{layer}.self_attn", self._norm(f"{layer}.input_layernorm", hidden))
            normed = self._norm(f"{layer}.post_attention_layernorm", hidden)
            gate = torch.nn.functional.silu(self._linear(f"{layer}.mlp.gate_proj", normed))
            hidden = hidden + self._linear(
                f"{layer}.mlp.down_proj", gate * self._linear(f"{layer}.mlp.up_proj", normed)
            )
        hidden = self._norm("model.norm", hidden[-num_last:])
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return self._linear(head, hidden)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        mean_square = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.config.rms_norm_eps) * self.tensors[f"{name}.weight"]

    def _heads(self, layer: str, kind: str, x: torch.Tensor) -> torch.Tensor:
        """`[heads, tokens, head_dim]`, normed where the model does that, and rotated unless they are values."""
        heads = self._linear(f"{layer}.{kind}_proj", x).unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)
        if f"{layer}.{kind}_norm.weight" in self.tensors:
            heads = self._norm(f"{layer}.{kind}_norm", heads)
        if kind == "v":
            return heads
        rotary_dim = self.config.rope.rotary_dim
        cos, sin = self.cos_sin[: len(x)].chunk(2, dim=-1)
        first, second = heads[..., :rotary_dim].chunk(2, dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin, heads[..., rotary_dim:])
        return torch.cat(rotated, dim=-1)

    def _attention(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._heads(layer, kind, x) for kind in "qkv")
        group = self.config.num_heads // self.config.num_kv_heads
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
        out = []
        for start in range(0, len(x), QUERY_ROWS):
            rows = q[:, start : start + QUERY_ROWS]
            stop = start + rows.shape[1]
            scores = rows @ k[:, :stop].transpose(1, 2) * self.config.attention_scale
            future = torch.arange(stop, device=self.device) > torch.arange(start, stop, device=self.device)[:, None]
            out.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, :stop])
        return self._linear(f"{layer}.o_proj", torch.cat(out, dim=1).transpose(0, 1).flatten(1))


def weights_of(name_or_path: str, config: ModelConfig, dummy: bool, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, or the dummy ones of its shape, by checkpoint name."""
    if not dummy:
        return dict(open_checkpoint(name_or_path).tensors())
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        projections = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
        for kind, shape in projections.items():
            shapes[f"{layer}.self_attn.{kind}_proj.weight"] = shape
            if config.o_bias if kind == "o" else config.qkv_bias:
                shapes[f"{layer}.self_attn.{kind}_proj.bias"] = shape[:1]
        if config.model_type == "qwen3":
            shapes |= {f"{layer}.self_attn.{kind}_norm.weight": (head_dim,) for kind in "qk"}
        mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        shapes |= {f"{layer}.mlp.{kind}_proj.weight": shape for kind, shape in mlp.items()}
        shapes |= {f"{layer}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
    return {name: dummy_tensor(0, name, shape, device) for name, shape in shapes.items()}
