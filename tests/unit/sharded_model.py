"""A tiny model with fused, sharded and tied parameters, to test the weight loader without the real layers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import nn

from tritonllm.models.parameters import CheckpointTensor

HIDDEN, QUERY, KEY, INNER, VOCABULARY = 8, 8, 4, 12, 16


class Stacked(nn.Module):
    """Several checkpoint tensors stacked by rows, of each of which this rank holds an equal share."""

    def __init__(self, rows: dict[str | None, int], columns: int, bias: bool, rank: int, size: int) -> None:
        super().__init__()
        self.rows, self.columns, self.rank, self.size = rows, columns, rank, size
        total = sum(rows.values()) // size
        self.weight = nn.Parameter(torch.full((total, columns), torch.nan), requires_grad=False)
        self.bias = nn.Parameter(torch.full((total,), torch.nan), requires_grad=False) if bias else None

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        for slot, rows in self.rows.items():
            yield CheckpointTensor("weight", slot, (rows, self.columns))
            if self.bias is not None:
                yield CheckpointTensor("bias", slot, (rows,))

    def load_tensor(self, leaf: str, slot: str | None, tensor: torch.Tensor) -> None:
        start = 0
        for name, rows in self.rows.items():
            share = rows // self.size
            if name == slot:
                getattr(self, leaf)[start : start + share] = tensor[self.rank * share : (self.rank + 1) * share]
            start += share


class Layer(nn.Module):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = Stacked({"q": QUERY, "k": KEY, "v": KEY}, HIDDEN, True, rank, size)
        self.self_attn.q_norm = nn.RMSNorm(4)
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = Stacked({"gate": INNER, "up": INNER}, HIDDEN, False, rank, size)
        # A name that contains a packed one: mapping by substring would take it for `up_proj`.
        self.mlp.up_proj_norm = nn.LayerNorm(INNER)


class TinyModel(nn.Module):
    packed = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }

    def __init__(self, tied: bool = False, rank: int = 0, size: int = 1, head_first: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=tied)
        head = Stacked({None: VOCABULARY}, HIDDEN, False, rank, size)
        if head_first:
            self.lm_head = head
        self.model = nn.Module()
        self.model.embed_tokens = Stacked({None: VOCABULARY}, HIDDEN, False, rank, size)
        self.model.layers = nn.ModuleList(Layer(rank, size) for _ in range(2))
        if not head_first:
            self.lm_head = head
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def checkpoint(tied: bool = False) -> dict[str, torch.Tensor]:
    """Every tensor of `TinyModel` under the names that a Hugging Face checkpoint has."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in ("model.layers.0", "model.layers.1"):
        for name, rows in (("q", QUERY), ("k", KEY), ("v", KEY)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{layer}.self_attn.q_norm.weight"] = (4,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{layer}.mlp.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{layer}.mlp.up_proj_norm.weight"] = (INNER,)
        shapes[f"{layer}.mlp.up_proj_norm.bias"] = (INNER,)
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
