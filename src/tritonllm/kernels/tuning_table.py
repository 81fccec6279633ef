"""A tuning table as a value: the best form of `skinny_linear` at a shape, and the best path of a layer for a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tritonllm.kernels.skinny_form import Form

TOKEN_BUCKETS = (1, 2, 4, 8, 16)
"""Most tokens of each bucket: an entry serves what is above the bucket before it."""

PATHS = ("skinny", "hopper", "mixed", "separate")
"""Names of the ways a decoder layer runs a decode batch; `models.decode_path` says what they are."""


class PathLimit(NamedTuple):
    """The most rows of a decode batch that a path serves."""

    rows: int
    path: str


UNTUNED_PATHS = {1024: (PathLimit(8, "skinny"),), 2048: (PathLimit(1, "skinny"),)}
"""By hidden size, where nothing was measured: where the skinny path beats the separate one on the H200, and not beyond.

Of one row little but reading weights and launching kernels takes time anywhere. Of more it depends on how well the
GPU's own library does, and that on how long the rows of the weights are.
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
        decode_paths: hidden size to the fastest path of a layer: limits by ascending rows, each for what is above the
            one before it; "separate" above all of them.
    """

    gpu: str
    date: str
    versions: Mapping[str, str]
    linears: Mapping[LinearKey, Form]
    decode_paths: Mapping[int, tuple[PathLimit, ...]]

    def form(self, tokens: int, columns: int, rows: int, gated: bool, normed: bool) -> Form | None:
        """The form for 1 to 16 tokens, None if that bucket was not measured."""
        return self.linears.get(LinearKey(columns, rows, gated, normed, 1 << (tokens - 1).bit_length()))

    def path(self, num_rows: int, hidden_size: int) -> str:
        """Name of the path for a batch of `num_rows`, whether the GPU has such kernels for the model or not.

        The smallest hidden size measured that is no smaller decides, the largest one above all of them.
        """
        paths = self.decode_paths or UNTUNED_PATHS
        size = min((size for size in paths if size >= hidden_size), default=max(paths))
        return next((limit.path for limit in paths[size] if num_rows <= limit.rows), "separate")

    def over(self, base: Tuning) -> Tuning:
        """This table, and what `base` has beyond it."""
        return Tuning(
            self.gpu,
            self.date,
            self.versions,
            {**base.linears, **self.linears},
            {**base.decode_paths, **self.decode_paths},
        )


UNTUNED = Tuning("", "", {}, {}, {})
"""The table of a GPU that nobody has measured."""
