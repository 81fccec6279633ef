"""The linear layers of shipped models as a benchmark runs them, alone: inputs, checks, times, and forms worth a try."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import resources

import torch
import torch.nn.functional as F

from tritonllm.bench.graph_timing import chain_microseconds
from tritonllm.bench.kernels.case import EPS, Place
from tritonllm.config import ModelConfig
from tritonllm.kernels.activation import silu_and_mul
from tritonllm.kernels.norm import add_rms_norm
from tritonllm.kernels.reference import linear
from tritonllm.kernels.skinny_form import Form, gemv
from tritonllm.kernels.skinny_linear import plan_skinny_linear
from tritonllm.kernels.skinny_table import token_block
from tritonllm.kernels.tuning_table import LinearKey

LARGEST_ERROR = 1e-2
"""Relative, in the 2-norm: four roundings to bfloat16 cost about 4e-3."""

_FEWEST_CALLS = 8
_MOST_STEPS = 4  # of a direct form, for each that is in flight: they are all written out, and more take long to compile
_GPU = Place(torch.device("cuda"), torch.bfloat16)


@dataclass(frozen=True)
class Shape:
    """A layer of a model: weight columns and rows (a gated weight counts both halves), and what is fused with it."""

    model: str
    part: str
    columns: int
    rows: int
    normed: bool = False
    gated: bool = False
    residual: bool = False

    @property
    def name(self) -> str:
        """For example "Qwen3-0.6B qkv"."""
        return f"{self.model} {self.part}"


def layers_of(model: str) -> list[Shape]:
    """The linear layers of a model whose shape comes with the package."""
    file = resources.files("tritonllm.bench") / "configs" / f"{model}.json"
    return layers_of_config(model, ModelConfig.from_hf_dict(json.loads(file.read_text(encoding="utf-8"))))


def layers_of_config(model: str, config: ModelConfig) -> list[Shape]:
    """The linear layers of a model of that name."""
    hidden, attention = config.hidden_size, config.num_heads * config.head_dim
    return [
        Shape(model, "qkv", hidden, attention + 2 * config.num_kv_heads * config.head_dim, normed=True),
        Shape(model, "o", attention, hidden, residual=True),
        Shape(model, "gate_up", hidden, 2 * config.intermediate_size, normed=True, gated=True),
        Shape(model, "down", config.intermediate_size, hidden, residual=True),
        Shape(model, "head", hidden, config.vocab_size),
    ]


class Layer:
    """A shape with random inputs and enough copies of its weight.

    Args:
        shape: which layer.
        tokens: rows of its input.
        place: device and dtype; default: bfloat16 on the GPU.
    """

    def __init__(self, shape: Shape, tokens: int, place: Place = _GPU) -> None:
        copies = place.copies(place.dtype.itemsize * shape.columns * shape.rows, _FEWEST_CALLS)
        self.shape = shape
        self.weights = [place.normal(shape.rows, shape.columns, scale=shape.columns**-0.5) for _ in range(copies)]
        self.x = place.normal(tokens, shape.columns)
        self.norm = place.normal(shape.columns) if shape.normed else None
        self.stream = place.normal(tokens, shape.columns)
        outputs = shape.rows // (2 if shape.gated else 1)
        self.residual = place.normal(tokens, outputs) if shape.residual else None
        self.out = torch.full((tokens, outputs), float("nan"), device=place.device, dtype=place.dtype)
        place.synchronize()

    @property
    def key(self) -> LinearKey:
        """The layer in a tuning table, with this number of tokens."""
        shape = self.shape
        return LinearKey(shape.columns, shape.rows, shape.gated, shape.normed, len(self.x))

    def call(self, weight: torch.Tensor, form: Form | None = None, pdl: bool | None = None) -> None:
        """Everything in one launch: by this form, or by what runs at this shape on this GPU."""
        plan_skinny_linear(
            self.x, weight, self.out, norm_weight=self.norm, eps=EPS, residual=self.residual, gated=self.shape.gated,
            form=form, pdl=pdl,
        ).run()  # fmt: skip

    def separately(self, weight: torch.Tensor) -> None:
        """The same work around cuBLAS, as larger batches do it: there each add is part of the norm that follows it."""
        x = self.x if self.norm is None else add_rms_norm(self.x, self.stream, self.norm, EPS)
        out = F.linear(x, weight)
        if self.shape.gated:
            silu_and_mul(out)

    def exact(self) -> torch.Tensor:
        """What a call on the first weight gives, in float64."""
        return linear.skinny_linear(
            self.x.double(),
            self.weights[0].double(),
            norm_weight=None if self.norm is None else self.norm.double(),
            eps=EPS,
            residual=None if self.residual is None else self.residual.double(),
            gated=self.shape.gated,
        )

    def error(self, form: Form | None = None) -> float:
        """Relative error of one call in the 2-norm; NaN counts as infinite."""
        self.out.fill_(float("nan"))
        torch.cuda.synchronize()
        self.call(self.weights[0], form)
        exact = self.exact()
        error = ((self.out.double() - exact).norm() / exact.norm()).item()
        return error if error == error else float("inf")

    def microseconds(self, call: Callable[[torch.Tensor], object]) -> float:
        """Time of one call, launched in a graph of one call a weight."""
        return chain_microseconds([partial(call, weight) for weight in self.weights])


def candidates(shape: Shape, tokens: int, shared_memory: int) -> list[Form]:
    """Forms worth a try at a shape, of those that a tuning table may hold for a GPU with so much shared memory."""
    block_m = token_block(tokens, shared_memory)
    return [form for form in _all_forms(shape, tokens) if form.fits(block_m, shape.gated, 2, shared_memory)]


def _all_forms(shape: Shape, tokens: int) -> Iterator[Form]:
    if tokens == 1:  # no direct ones: alone they may be faster, but kernels after them start later
        for block_k, rows, num_warps in (
            (256, 2, 2), (256, 4, 2), (256, 4, 4), (256, 8, 4), (512, 4, 4), (1024, 2, 4), (1024, 4, 4), (1024, 8, 4),
            (2048, 1, 8), (2048, 2, 8), (4096, 1, 8),
        ):  # fmt: skip
            if block_k <= 2 * shape.columns and shape.columns * rows <= 64 * 256 * num_warps:
                yield gemv(block_k, rows, num_warps)
        return
    halves = 2 if shape.gated else 1
    for tile_rows, block_k, num_warps, stages in (
        (16, 128, 4, 2), (16, 128, 8, 1), (16, 128, 8, 2), (16, 128, 16, 2), (32, 64, 8, 3), (32, 64, 16, 3),
        (32, 128, 8, 1), (32, 128, 8, 2), (32, 128, 16, 1), (32, 256, 4, 1), (64, 64, 16, 1),
    ):  # fmt: skip
        steps = -(-shape.columns // (num_warps * block_k))
        if num_warps * block_k < 2 * shape.columns and stages <= steps <= _MOST_STEPS * stages:
            yield Form("direct", tile_rows // halves, block_k, num_warps, split=num_warps, num_stages=stages)
    for tile_rows, block_k, num_warps, split, stages in (
        (16, 64, 4, 4, 5), (16, 128, 4, 4, 4), (32, 64, 4, 4, 4), (32, 128, 2, 1, 5), (32, 128, 4, 1, 5),
        (64, 128, 4, 1, 4), (64, 64, 4, 1, 6), (128, 64, 4, 1, 4),
    ):  # fmt: skip
        yield Form("looped", tile_rows // halves, block_k, num_warps, split=split, num_stages=stages)
