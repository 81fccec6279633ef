"""Norms, activation, and the integers of decode rows as cases."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from tritonllm import kernels
from tritonllm.bench.kernels.case import EPS, Case, Place, Prepared, Timed, Work, different, worst_error
from tritonllm.kernels import reference
from tritonllm.kernels.row_layout import CONTEXT_LEN, HEADER, TOKEN
from tritonllm.testing.poison import poisoned_memory


@dataclass(frozen=True)
class RmsNorm(Case):
    """`rms_norm` of rows."""

    op: ClassVar[str] = "rms_norm"
    tokens: int
    columns: int

    def work(self, itemsize: int) -> Work:
        return Work((2 * self.tokens + 1) * self.columns * itemsize)

    def prepare(self, place: Place) -> Prepared:
        copies = place.copies(self.work(place.dtype.itemsize).bytes)
        x, weight = place.normal(copies, self.tokens, self.columns), place.normal(self.columns)
        calls = [partial(kernels.rms_norm, each, weight, EPS) for each in x]

        def error() -> float:
            with poisoned_memory():
                out = calls[0]()
            return worst_error(out, reference.rms_norm(x[0].double(), weight.double(), EPS))

        return Prepared(Timed(calls, error, place.bound))


@dataclass(frozen=True)
class AddRmsNorm(Case):
    """`add_rms_norm` of rows; the residual stream is read and written."""

    op: ClassVar[str] = "add_rms_norm"
    tokens: int
    columns: int

    def work(self, itemsize: int) -> Work:
        return Work((4 * self.tokens + 1) * self.columns * itemsize)

    def prepare(self, place: Place) -> Prepared:
        copies = place.copies(self.work(place.dtype.itemsize).bytes)
        x, residual = place.normal(2, copies, self.tokens, self.columns)
        weight = place.normal(self.columns)
        calls = [partial(kernels.add_rms_norm, *each, weight, EPS) for each in zip(x, residual, strict=True)]

        def error() -> float:
            added = residual[0].double()
            exact = reference.add_rms_norm(x[0].double(), added, weight.double(), EPS)
            with poisoned_memory():
                out = calls[0]()
            return max(worst_error(out, exact), worst_error(residual[0], added))

        return Prepared(Timed(calls, error, place.bound))


@dataclass(frozen=True)
class SiluAndMul(Case):
    """`silu_and_mul` into rows of so many columns."""

    op: ClassVar[str] = "silu_and_mul"
    tokens: int
    columns: int

    def work(self, itemsize: int) -> Work:
        return Work(3 * self.tokens * self.columns * itemsize)

    def prepare(self, place: Place) -> Prepared:
        gate_up = place.normal(place.copies(self.work(place.dtype.itemsize).bytes), self.tokens, 2 * self.columns)
        calls = [partial(getattr(kernels, self.op), each) for each in gate_up]

        def error() -> float:
            with poisoned_memory():
                out = calls[0]()
            return worst_error(out, self.exact(*gate_up[0].double().chunk(2, -1)))

        return Prepared(Timed(calls, error, place.bound))

    @staticmethod
    def exact(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """What comes out, in the dtype of both."""
        return gate * gate.sigmoid() * up


@dataclass(frozen=True)
class GeluAndMul(SiluAndMul):
    """The same of `gelu_and_mul`."""

    op: ClassVar[str] = "gelu_and_mul"

    @staticmethod
    def exact(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(gate) * up


@dataclass(frozen=True)
class LoadRows(Case):
    """`load_rows` of decode rows in the middle of their blocks."""

    op: ClassVar[str] = "load_rows"
    batch: int
    context: int
    block_size: int = 256
    vocab_size: int = 1 << 20

    def work(self, itemsize: int) -> Work:
        return Work(7 * 4 * self.batch)  # token, context and block in; id, position, slot and context out

    def prepare(self, place: Place) -> Prepared:
        rows = _rows(place, self.batch, self.context, self.block_size, self.vocab_size)
        sizes = self.batch, self.block_size, self.vocab_size
        calls = [partial(kernels.load_rows, each, *sizes) for each in rows]

        def error() -> float:
            with poisoned_memory():
                loaded = calls[0]()
            return different(*zip(loaded, reference.load_rows(rows[0], *sizes), strict=True))

        return Prepared(Timed(calls, error, 0.0))


@dataclass(frozen=True)
class AdvanceRows(Case):
    """`advance_rows` of decode rows."""

    op: ClassVar[str] = "advance_rows"
    batch: int
    context: int
    block_size: int = 256

    def work(self, itemsize: int) -> Work:
        return Work(5 * 4 * self.batch)  # the token in; token, context and a copy out, the context read before

    def prepare(self, place: Place) -> Prepared:
        rows = _rows(place, self.batch, self.context, self.block_size, 1000)
        tokens = torch.arange(self.batch, dtype=torch.int32, device=place.device)
        sampled = torch.full_like(tokens, -1)
        calls = [partial(kernels.advance_rows, each, tokens, sampled) for each in rows]

        def error() -> float:
            expected, copied = rows[0].clone(), torch.empty_like(tokens)
            reference.advance_rows(expected, tokens, copied)
            calls[0]()
            return different((rows[0], expected), (sampled, copied))

        return Prepared(Timed(calls, error, 0.0))


@dataclass(frozen=True)
class LongestFirst(Case):
    """`longest_first` of random lengths."""

    op: ClassVar[str] = "longest_first"
    batch: int

    def work(self, itemsize: int) -> Work:
        return Work(2 * 4 * self.batch)

    def prepare(self, place: Place) -> Prepared:
        shape = place.copies(self.work(4).bytes), self.batch
        lens = torch.randint(0, 2048, shape, dtype=torch.int32, device=place.device)
        calls = [partial(kernels.longest_first, each) for each in lens]

        def error() -> float:
            with poisoned_memory():
                order = calls[0]()
            return different((order, reference.longest_first(lens[0])))

        return Prepared(Timed(calls, error, 0.0))


def _rows(place: Place, batch: int, context: int, block_size: int, vocab_size: int) -> torch.Tensor:
    """Decode rows int32 [copies, B, HEADER + blocks] of one context length."""
    blocks = -(-(context + 1) // block_size // 4) * 4  # rows as aligned as an engine's
    copies = place.copies(4.0 * batch * (HEADER + blocks))
    rows = torch.zeros(copies, batch, HEADER + blocks, dtype=torch.int32, device=place.device)
    rows[..., TOKEN].random_(0, vocab_size)
    rows[..., CONTEXT_LEN] = context
    rows[..., HEADER:] = torch.randperm(batch * blocks, device=place.device).to(torch.int32).view(batch, blocks)
    return rows
