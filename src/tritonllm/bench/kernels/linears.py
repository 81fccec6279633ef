"""Linear layers as cases, beside cuBLAS: `F.linear` on the same weights, which is the product alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F

from tritonllm import kernels
from tritonllm.bench.kernels.case import EPS, Case, Place, Prepared, Timed, Work, worst_error
from tritonllm.bench.linear_layers import Layer, Shape
from tritonllm.errors import ConfigError
from tritonllm.kernels.hopper_linear import serves_shape
from tritonllm.kernels.skinny_linear import MAX_ROWS
from tritonllm.testing.poison import poisoned_memory


@dataclass(frozen=True)
class _Linear(Case):
    """Weight columns and rows (a gated weight counts both halves), and what is fused with the product."""

    tokens: int
    columns: int
    rows: int

    def layer(self) -> Shape:
        """The same as `linear_layers` takes it."""
        return Shape("", "", self.columns, self.rows)

    def work(self, itemsize: int) -> Work:
        layer = self.layer()
        outputs = self.rows // 2 if layer.gated else self.rows
        values = self.columns * self.rows + self.tokens * (self.columns + outputs)
        values += self.columns * layer.normed + self.tokens * outputs * layer.residual
        return Work(values * itemsize, 2 * self.tokens * self.columns * self.rows)

    def _prepare(
        self, layer: Layer, place: Place, call: Callable[[torch.Tensor], torch.Tensor], bound: float | None = None
    ) -> Prepared:
        """Ours on every weight, and cuBLAS's product on every weight."""
        calls = [partial(call, weight) for weight in layer.weights]

        def error() -> float:
            with poisoned_memory():
                out = calls[0]()
            return worst_error(out.sum(0) if out.dim() == 3 else out, layer.exact())

        def product_error() -> float:
            return worst_error(F.linear(layer.x, layer.weights[0]), layer.x.double() @ layer.weights[0].double().T)

        cublas = Timed([partial(F.linear, layer.x, weight) for weight in layer.weights], product_error, place.bound)
        return Prepared(Timed(calls, error, place.bound if bound is None else bound), {"cuBLAS": cublas})


@dataclass(frozen=True)
class SkinnyLinear(_Linear):
    """`skinny_linear`: for at most 16 tokens."""

    op: ClassVar[str] = "skinny_linear"
    normed: bool = False
    gated: bool = False
    residual: bool = False

    def __post_init__(self) -> None:
        if self.tokens > MAX_ROWS:
            raise ConfigError(f"skinny_linear takes at most {MAX_ROWS} tokens, not {self.tokens}.")

    def layer(self) -> Shape:
        return Shape("", "", self.columns, self.rows, self.normed, self.gated, self.residual)

    def prepare(self, place: Place) -> Prepared:
        layer = Layer(self.layer(), self.tokens, place)

        def call(weight: torch.Tensor) -> torch.Tensor:
            return kernels.skinny_linear(
                layer.x, weight, norm_weight=layer.norm, eps=EPS, residual=layer.residual, gated=self.gated
            )

        return self._prepare(layer, place, call)


@dataclass(frozen=True)
class HopperLinear(_Linear):
    """`hopper_linear`: decode batches on Hopper."""

    op: ClassVar[str] = "hopper_linear"
    gated: bool = False

    def layer(self) -> Shape:
        return Shape("", "", self.columns, self.rows, gated=self.gated)

    def unsupported(self, place: Place) -> str | None:
        return _needs_hopper(self.columns, place)

    def prepare(self, place: Place) -> Prepared:
        layer = Layer(self.layer(), self.tokens, place)
        return self._prepare(layer, place, lambda weight: kernels.hopper_linear(layer.x, weight, gated=self.gated))


@dataclass(frozen=True)
class HopperLinearParts(_Linear):
    """`hopper_linear_parts`, whose float32 parts count as one output of the activations' type."""

    op: ClassVar[str] = "hopper_linear_parts"

    def unsupported(self, place: Place) -> str | None:
        return _needs_hopper(self.columns, place)

    def prepare(self, place: Place) -> Prepared:
        layer = Layer(self.layer(), self.tokens, place)
        # Nothing is rounded to the activations' type.
        return self._prepare(layer, place, lambda weight: kernels.hopper_linear_parts(layer.x, weight), 1e-3)


def _needs_hopper(columns: int, place: Place) -> str | None:
    if serves_shape(columns, place.dtype, place.device):
        return None
    return "the op is for Hopper GPUs, 16-bit floats and rows of a multiple of 8"
