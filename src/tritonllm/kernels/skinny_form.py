"""The forms that `skinny_linear` can take, as values: a kernel and its tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["gemv", "direct", "looped"]
KINDS: tuple[str, ...] = get_args(Kind)

_LANE_LOAD = 8  # 16-bit elements that a thread loads at once
_WARP_LOAD = 32 * _LANE_LOAD


@dataclass(frozen=True)
class Form:
    """A kernel and its tile.

    Attributes:
        kind: "gemv" multiplies one token on the plain cores; "direct" reads both operands of the tensor
            cores straight into registers; "looped" streams them through shared memory.
        block_n: output columns (rows of the weight) of a tile.
        block_k: columns of the weight in a step; of each part if there are several.
        num_warps: warps of a program.
        tiles: tiles of block_n rows that a gemv program takes.
        split: parts into which a step divides the sum, one to a warp or more; 1 uses plain matrices.
        num_stages: steps in flight in a direct or a looped form.
        x_rows: equal rows in which a gemv program holds x.
    """

    kind: Kind
    block_n: int
    block_k: int
    num_warps: int
    tiles: int = 1
    split: int = 1
    num_stages: int = 1

    @property
    def x_rows(self) -> int:
        return self.block_n if self.block_k < self.num_warps * _WARP_LOAD else 1

    def fits(self, block_m: int, gated: bool, itemsize: int, shared_memory: int) -> bool:
        """Whether a program's tiles, with block_m columns of tokens, fit into that many bytes of shared memory."""
        step = self.block_k * self.split * itemsize
        rows = self.block_n * (2 if gated else 1)
        if self.kind == "direct":
            # The parts of the sums change threads there; so does a step of x where its layout is no operand's.
            return max(4 * self.split * rows, step) * block_m <= shared_memory
        if self.kind == "looped":
            return self.num_stages * step * (rows + block_m) <= shared_memory
        return True


def gemv(block_k: int, rows: int, num_warps: int) -> Form:
    """The one-token form with `rows` rows a program.

    With block_k = 256 a warp loads one row at once and owns it, so that no sum leaves a warp; with 256 columns a warp
    all warps share each row.
    """
    block_n = max(1, min(rows, num_warps * _WARP_LOAD // block_k)) if block_k < num_warps * _WARP_LOAD else rows
    return Form("gemv", block_n, block_k, num_warps, tiles=rows // block_n)
