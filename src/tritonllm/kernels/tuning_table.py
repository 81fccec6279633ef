"""A tuning table as a value: the best form of `skinny_linear` at a shape, and how many rows the fused layer takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tritonllm.kernels.skinny_form import Form

TOKEN_BUCKETS = (1, 2, 4, 8, 16)
"""Most tokens of each bucket: an entry serves what is above the bucket before it."""

UNTUNED_ROWS = 4
"""Rows up to which the fused layer serves where nothing was measured.

As on the H200 at the largest hidden size measured, where it wins least: reading weights and launching kernels is all
that so few rows cost anywhere, and above them it depends on how well the GPU's own library does.
"""


class LinearKey(NamedTuple):
    """A linear layer: shape of the weight (a gated one counts gate and up rows), what is fused, bucket of tokens."""

    columns: int
    rows: int
    gated: bool
    normed: bool
    tokens: int


@dataclass(frozen=True, eq=False)
class Tuning:
    """A table. Two are equal only if they are one, so that choices made from it can be cached.

    Attributes:
        gpu: name of the GPU it was measured on.
        date: when, as year-month-day.
        versions: of torch and triton then.
        linears: the form of a layer with 16-bit weights.
        fused_rows: hidden size to rows of the largest decode batch that the fused layer serves faster.
    """

    gpu: str
    date: str
    versions: Mapping[str, str]
    linears: Mapping[LinearKey, Form]
    fused_rows: Mapping[int, int]

    def form(self, tokens: int, columns: int, rows: int, gated: bool, normed: bool) -> Form | None:
        """The form for 1 to 16 tokens, None if that bucket was not measured."""
        return self.linears.get(LinearKey(columns, rows, gated, normed, 1 << (tokens - 1).bit_length()))

    def largest_fused(self, hidden_size: int) -> int:
        """Rows of the largest batch for the fused layer.

        Long rows of weights favour the GPU's own library. So the next larger size that was measured decides, and above
        all of them what is fewer: the rows of the largest, or those of an unknown GPU.
        """
        measured = min((size for size in self.fused_rows if size >= hidden_size), default=None)
        if measured is not None:
            return self.fused_rows[measured]
        largest = max(self.fused_rows, default=None)
        return UNTUNED_ROWS if largest is None else min(UNTUNED_ROWS, self.fused_rows[largest])

    def over(self, base: Tuning) -> Tuning:
        """This table, and what `base` has beyond it."""
        return Tuning(
            self.gpu,
            self.date,
            self.versions,
            {**base.linears, **self.linears},
            {**base.fused_rows, **self.fused_rows},
        )


UNTUNED = Tuning("", "", {}, {}, {})
"""The table of a GPU that nobody has measured."""
