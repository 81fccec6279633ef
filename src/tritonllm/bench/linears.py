"""Skinny linears against PyTorch at the shapes of shipped models: `python -m tritonllm.bench.linears [--tune]`.

Each shape is checked against float64, then timed: calls on different weights, more than the L2 cache holds, in one CUDA
graph, median of its replays. The other side is `F.linear` alone (cuBLAS), without the norm, activation and add that
ours includes. `--tune` times other forms of each shape as well and names the best, for `kernels/skinny_table.py`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from tritonllm.errors import KernelError, TritonLLMError
from tritonllm.kernels.reference import linear
from tritonllm.kernels.skinny_linear import plan_skinny_linear
from tritonllm.kernels.skinny_table import Form, gemv

_ROTATED_BYTES = 400 << 20
_FEWEST_CALLS = 8
_REPLAYS = 12
_EPS = 1e-6
_LARGEST_ERROR = 1e-2  # relative, in the 2-norm: four roundings to bfloat16 cost about 4e-3


@dataclass(frozen=True)
class Shape:
    """A layer: weight columns and rows (a gated weight counts both halves), and what is fused with it."""

    name: str
    columns: int
    rows: int
    norm: bool = False
    gated: bool = False
    residual: bool = False


def _layers(model: str, hidden: int, qkv: int, attention: int, intermediate: int, vocab: int) -> list[Shape]:
    return [
        Shape(f"{model} qkv", hidden, qkv, norm=True),
        Shape(f"{model} o", attention, hidden, residual=True),
        Shape(f"{model} gate_up", hidden, 2 * intermediate, norm=True, gated=True),
        Shape(f"{model} down", intermediate, hidden, residual=True),
        Shape(f"{model} head", hidden, vocab),
    ]


SHAPES = [
    *_layers("Qwen3-0.6B", 1024, 4096, 2048, 3072, 151936),
    *_layers("Llama-3.2-1B", 2048, 3072, 2048, 8192, 128256),
    *_layers("Qwen3-8B", 4096, 6144, 4096, 12288, 151936),
    *_layers("SmolLM2-135M", 576, 960, 576, 1536, 49152),
]


class Layer:
    """A shape with random bfloat16 inputs and enough copies of its weight."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16) * scale

        copies = max(_FEWEST_CALLS, -(-_ROTATED_BYTES // (2 * shape.columns * shape.rows)))
        self.shape = shape
        self.weights = [normal(shape.rows, shape.columns, scale=shape.columns**-0.5) for _ in range(copies)]
        self.x = normal(tokens, shape.columns)
        self.norm = normal(shape.columns) if shape.norm else None
        outputs = shape.rows // (2 if shape.gated else 1)
        self.residual = normal(tokens, outputs) if shape.residual else None
        self.out = torch.full((tokens, outputs), float("nan"), device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()

    def call(self, weight: torch.Tensor, form: Form | None = None, pdl: bool | None = None) -> None:
        plan_skinny_linear(
            self.x, weight, self.out, norm_weight=self.norm, eps=_EPS, residual=self.residual, gated=self.shape.gated,
            form=form, pdl=pdl,
        ).run()  # fmt: skip

    def error(self, form: Form | None = None) -> float:
        """Relative error of one call in the 2-norm; NaN counts as infinite."""
        self.out.fill_(float("nan"))
        torch.cuda.synchronize()
        self.call(self.weights[0], form)
        exact = linear.skinny_linear(
            self.x.double(),
            self.weights[0].double(),
            norm_weight=None if self.norm is None else self.norm.double(),
            eps=_EPS,
            residual=None if self.residual is None else self.residual.double(),
            gated=self.shape.gated,
        )
        error = ((self.out.double() - exact).norm() / exact.norm()).item()
        return error if error == error else float("inf")

    def microseconds(self, call: Callable[[torch.Tensor], object]) -> float:
        """Time of one call, launched in a graph of one call a weight."""
        call(self.weights[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in self.weights:
                call(weight)
        graph.replay()
        times = []
        for _ in range(_REPLAYS):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        return statistics.median(times) * 1e3 / len(self.weights)


def candidates(shape: Shape, tokens: int) -> Iterator[Form]:
    """Forms worth a try at a shape."""
    if tokens == 1:
        for block_k, rows, num_warps in (
            (256, 2, 2), (256, 4, 2), (256, 4, 4), (256, 8, 4), (512, 4, 4), (1024, 2, 4), (1024, 4, 4), (1024, 8, 4),
            (2048, 1, 8), (2048, 2, 8), (4096, 1, 8),
        ):  # fmt: skip
            if block_k <= 2 * shape.columns and shape.columns * rows <= 64 * 256 * num_warps:
                yield gemv(block_k, rows, num_warps)
        return
    halves = 2 if shape.gated else 1
    if shape.columns <= 4096:
        step = 1 << (shape.columns - 1).bit_length()
        for num_warps in (4, 8):
            for tile_rows in (16, 32):
                if tile_rows * step <= num_warps * 32 * 256:
                    yield Form("one_shot", tile_rows // halves, step // num_warps, num_warps, split=num_warps)
    for tile_rows, block_k, num_warps, split, stages in (
        (16, 64, 4, 4, 5), (16, 128, 4, 4, 4), (32, 64, 4, 4, 4), (32, 128, 2, 1, 5), (32, 128, 4, 1, 5),
        (64, 128, 4, 1, 4), (64, 64, 4, 1, 6), (128, 64, 4, 1, 4),
    ):  # fmt: skip
        yield Form("looped", tile_rows // halves, block_k, num_warps, split=split, num_stages=stages)


def tune(layer: Layer, tokens: int) -> str:
    """The fastest candidate that computes the right thing."""
    timed = []
    for form in candidates(layer.shape, tokens):
        try:
            if layer.error(form) <= _LARGEST_ERROR:
                timed.append((layer.microseconds(partial(layer.call, form=form)), form))
        except TritonLLMError:
            raise
        except Exception as error:  # a tile that this GPU has not the resources for
            print(f"    {form}: {type(error).__name__}")
    microseconds, form = min(timed, key=lambda pair: pair[0])
    return f"    best {microseconds:.2f} us: {form}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--only", default="", help="part of a layer's name, for example 'Qwen3-0.6B'")
    parser.add_argument("--tune", action="store_true", help="try other forms of each shape")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "This benchmark needs a CUDA device, and torch sees none.\n")
    torch.manual_seed(0)
    print(f"{'layer':22}{'M':>3}  {'K -> rows':15}{'us':>8}{'TB/s':>6}{'no PDL':>8}{'F.linear':>9}{'error':>9}")
    for shape in SHAPES:
        if options.only not in shape.name:
            continue
        for tokens in options.tokens:
            layer = Layer(shape, tokens)
            error = layer.error()
            if error > _LARGEST_ERROR:
                raise KernelError(f"skinny_linear is wrong at {shape} with {tokens} tokens: relative error {error:.1e}")
            ours = layer.microseconds(layer.call)
            apart = layer.microseconds(partial(layer.call, pdl=False))
            theirs = layer.microseconds(partial(F.linear, layer.x))
            speed = 2e-6 * shape.columns * shape.rows / ours
            size = f"{shape.columns} -> {shape.rows}"
            print(
                f"{shape.name:22}{tokens:3}  {size:15}{ours:8.2f}{speed:6.2f}{apart:8.2f}{theirs:9.2f}{error:9.1e}",
                flush=True,
            )
            if options.tune:
                print(tune(layer, tokens), flush=True)
            del layer


if __name__ == "__main__":
    main()
