"""Linear layers that hold one rank's shard and know how to fill it from whole checkpoint tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tritonllm.errors import CheckpointError
from tritonllm.models.parameters import CheckpointTensor
from tritonllm.models.tensor_parallel import TPGroup


def check_shape(source: torch.Tensor, expected: Sequence[int], what: str) -> None:
    """Raise `CheckpointError` unless a whole checkpoint tensor has the shape that the configuration promises."""
    if tuple(source.shape) != tuple(expected):
        raise CheckpointError(f"{what} has shape {list(source.shape)}, the configuration asks for {list(expected)}")


def copy_checked(target: torch.Tensor, source: torch.Tensor, expected: Sequence[int], what: str, part: slice) -> None:
    """Copy rows `part` of a whole checkpoint tensor into a parameter, after comparing the whole shape.

    Raises:
        CheckpointError: `source` does not have the shape that the configuration promises.
    """
    check_shape(source, expected, what)
    with torch.no_grad():
        target.copy_(source[part])


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor inside a fused parameter.

    Attributes:
        slot: its name in the model's `packed` table, None for a layer that is not fused.
        rows: rows of the whole tensor.
        start: first row that this rank holds.
        length: rows that this rank holds.
    """

    slot: str | None
    rows: int
    start: int
    length: int


class ColumnLinear(nn.Module):
    """`y = x W^T + b` with the output rows split over the ranks; several checkpoint tensors may be stacked in W.

    Shapes: x `[..., in_features]`, result `[..., sum of this rank's rows]`.

    Args:
        in_features: columns of W.
        parts: what is stacked in W.
        bias: whether there is one.
        stacked: the checkpoint has all parts in one tensor, in their order, named as this layer is.
    """

    def __init__(self, in_features: int, parts: Sequence[Part], bias: bool, stacked: bool = False) -> None:
        super().__init__()
        self.stacked = stacked
        self.in_features = in_features
        self.parts = tuple(parts)
        rows = sum(part.length for part in parts)
        self.weight = nn.Parameter(torch.empty(rows, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        if self.stacked:
            rows = sum(part.rows for part in self.parts)
            yield CheckpointTensor("weight", None, (rows, self.in_features))
            if self.bias is not None:
                yield CheckpointTensor("bias", None, (rows,))
            return
        for part in self.parts:
            yield CheckpointTensor("weight", part.slot, (part.rows, self.in_features))
            if self.bias is not None:
                yield CheckpointTensor("bias", part.slot, (part.rows,))

    def load_tensor(self, leaf: str, slot: str | None, tensor: torch.Tensor) -> None:
        if self.stacked:
            rows = [part.rows for part in self.parts]
            check_shape(tensor, (sum(rows), self.in_features) if leaf == "weight" else (sum(rows),), leaf)
            for part, piece in zip(self.parts, tensor.split(rows), strict=True):
                self._load_part(leaf, part.slot, piece)
        else:
            self._load_part(leaf, slot, tensor)

    def _load_part(self, leaf: str, slot: str | None, tensor: torch.Tensor) -> None:
        offset = 0
        for part in self.parts:
            if part.slot == slot:
                expected = (part.rows, self.in_features) if leaf == "weight" else (part.rows,)
                target = getattr(self, leaf)[offset : offset + part.length]
                copy_checked(target, tensor, expected, leaf, slice(part.start, part.start + part.length))
                return
            offset += part.length
        raise CheckpointError(f"no slot {slot!r} here; the slots are {[part.slot for part in self.parts]}")


class QKVLinear(ColumnLinear):
    """The three attention projections as one matrix product; slots `q`, `k`, `v`.

    Key and value heads are replicated when there are fewer of them than ranks. `stacked` as in `ColumnLinear`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        tp: TPGroup,
        stacked: bool = False,
    ) -> None:
        start, length = tp.split(num_heads, "num_heads")
        kv_start, kv_length = tp.split_kv_heads(num_kv_heads)
        query = Part("q", num_heads * head_dim, start * head_dim, length * head_dim)
        key, value = (
            Part(slot, num_kv_heads * head_dim, kv_start * head_dim, kv_length * head_dim) for slot in ("k", "v")
        )
        super().__init__(hidden_size, (query, key, value), bias, stacked)


class GateUpLinear(ColumnLinear):
    """The gate and up projections of a gated MLP as one matrix product; slots `gate`, `up`.

    `stacked` as in `ColumnLinear`.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, tp: TPGroup, stacked: bool = False
    ) -> None:
        start, length = tp.split(intermediate_size, "intermediate_size")
        parts = [Part(slot, intermediate_size, start, length) for slot in ("gate", "up")]
        super().__init__(hidden_size, parts, bias, stacked)


class RowLinear(nn.Module):
    """`y = sum over ranks of x_r W_r^T, + b` with the input columns split over the ranks; the bias is added once.

    Shapes: x `[..., this rank's columns]`, result `[..., out_features]`.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, tp: TPGroup) -> None:
        super().__init__()
        self.tp = tp
        self.in_features = in_features
        self.start, length = tp.split(in_features, "input features")
        self.weight = nn.Parameter(torch.empty(out_features, length), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @property
    def own_bias(self) -> torch.Tensor | None:
        """The bias as far as this rank adds it: rank 0 does."""
        return self.bias if self.tp.rank == 0 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(self.term(x))

    def term(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's term of the sum that `forward` gives."""
        return F.linear(x, self.weight, self.own_bias)

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        out_features = self.weight.shape[0]
        yield CheckpointTensor("weight", None, (out_features, self.in_features))
        if self.bias is not None:
            yield CheckpointTensor("bias", None, (out_features,))

    def load_tensor(self, leaf: str, slot: str | None, tensor: torch.Tensor) -> None:
        out_features, length = self.weight.shape
        if leaf == "bias":
            copy_checked(self.bias, tensor, (out_features,), leaf, slice(None))  # type: ignore[arg-type]
            return
        columns = slice(self.start, self.start + length)
        copy_checked(self.weight.T, tensor.T, (self.in_features, out_features), leaf, columns)
