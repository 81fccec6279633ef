"""Attention as cases: decode, alone and with norm, rotation and store inside, and prefill in both forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tritonllm import kernels
from tritonllm.bench.kernels.case import EPS, Case, Heads, Place, Prepared, Timed, Work, worst_error
from tritonllm.bench.kernels.decode_batch import DecodeBatch
from tritonllm.bench.limits import seen_pairs
from tritonllm.errors import ConfigError
from tritonllm.kernels import reference
from tritonllm.kernels.prefill_hopper import HOPPER_TILE_ROWS, serves_shape
from tritonllm.kernels.prefill_tiling import PrefillTiling
from tritonllm.testing.poison import poisoned_memory

FORMS = ("portable", "hopper")
SDPA = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "SDPA flash": SDPBackend.FLASH_ATTENTION}
"""What torch's scaled_dot_product_attention has for long prompts, by name."""


@dataclass(frozen=True)
class DecodeAttention(Case):
    """`decode_attention` of a batch with one context length."""

    op: ClassVar[str] = "decode_attention"
    heads: Heads
    batch: int
    context: int
    block_size: int = 256
    window: int | None = None

    def work(self, itemsize: int) -> Work:
        heads = self.heads
        values = heads.num_heads * heads.head_dim * self.batch  # of q; the output has as many
        keys = min(self.context, self.window or self.context)
        return Work(heads.kv_bytes(self.batch * keys, itemsize) + 2 * values * itemsize, 4 * values * keys)

    def prepare(self, place: Place) -> Prepared:
        batch = DecodeBatch(self.heads, [self.context] * self.batch, place, self.block_size, window=self.window)
        after = batch.lens, batch.scale
        attention = partial(kernels.decode_attention, window=self.window)
        calls = [
            partial(attention, batch.q, batch.k_cache, batch.v_cache, table, *after, batch.workspace)
            for table in batch.tables
        ]

        def error() -> float:
            with poisoned_memory():
                out = calls[0]()
            cache = batch.k_cache, batch.v_cache, batch.tables[0]
            exact = reference.decode_attention(batch.q.float(), *cache, *after, window=self.window)
            return worst_error(out, exact)

        return Prepared(Timed(calls, error, place.bound))


@dataclass(frozen=True)
class FusedDecodeAttention(Case):
    """`fused_decode_attention` of a batch with one context length, every read behind the kernel before."""

    op: ClassVar[str] = "fused_decode_attention"
    heads: Heads
    batch: int
    context: int
    normed: bool = False
    block_size: int = 256
    window: int | None = None

    def work(self, itemsize: int) -> Work:
        heads = self.heads
        values = heads.num_heads * heads.head_dim * self.batch
        # Of the last key and value of a row, which are in qkv, the write takes the place of the read.
        keys = min(self.context, self.window or self.context)
        kv = heads.kv_bytes(self.batch * keys, itemsize)
        return Work(kv + (heads.width * self.batch + values) * itemsize, 4 * values * keys)

    def prepare(self, place: Place) -> Prepared:
        contexts = [self.context] * self.batch
        batch = DecodeBatch(self.heads, contexts, place, self.block_size, normed=self.normed, window=self.window)
        before = batch.qkv, batch.cos_sin, batch.positions, batch.k_cache, batch.v_cache
        norms: dict[str, Any] = {"q_norm": batch.norm, "k_norm": batch.norm, "eps": EPS}
        num_heads = self.heads.num_heads
        calls = [
            partial(
                kernels.fused_decode_attention, *before, slots, table, batch.lens, num_heads, batch.scale,
                batch.workspace, **norms, window=self.window,
            )
            for slots, table in zip(batch.slots, batch.tables, strict=True)
        ]  # fmt: skip

        def error() -> float:
            # q and k with the op's own roundings; attention over them in float32.
            q = reference.rope_store_kv(*before, batch.slots[0], num_heads, **norms)
            cache = batch.k_cache, batch.v_cache, batch.tables[0]
            exact = reference.decode_attention(q.float(), *cache, batch.lens, batch.scale, window=self.window)
            stored = batch.new_keys(0)
            batch.poison_new_keys(0)
            with poisoned_memory():
                out = calls[0]()
            return max(worst_error(out, exact), *map(worst_error, batch.new_keys(0), stored))

        return Prepared(Timed(calls, error, place.bound))


@dataclass(frozen=True)
class PrefillAttention(Case):
    """`prefill_attention` of causal prompts of one length, by one of its forms; behind cached tokens with a prefix."""

    op: ClassVar[str] = "prefill_attention"
    form: str
    heads: Heads
    batch: int
    length: int
    prefix: int = 0
    block_size: int = 256
    window: int | None = None

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ConfigError(f"prefill_attention has no form {self.form!r}, only {' and '.join(FORMS)}.")

    def unsupported(self, place: Place) -> str | None:
        if self.form == "portable":
            return None
        if self.window is not None:
            return "the Hopper form has no windows"
        there = serves_shape(self.heads.head_dim, place.dtype, self.block_size, place.device)
        return None if there else "the Hopper form does not serve these heads and blocks on this GPU"

    def work(self, itemsize: int) -> Work:
        heads = self.heads
        context = self.prefix + self.length
        pairs = self.batch * (seen_pairs(context, self.window) - seen_pairs(self.prefix, self.window))
        values = 2 * heads.num_heads * heads.head_dim * self.batch * self.length
        keys = context - max(self.prefix + 1 - (self.window or context), 0)  # the first query sees the first of them
        kv = heads.kv_bytes(self.batch * keys, itemsize)
        return Work(kv + values * itemsize, 4 * heads.num_heads * heads.head_dim * pairs)

    def prepare(self, place: Place) -> Prepared:
        prompts = _Prompts(self, place)
        calls: list[Callable[[], torch.Tensor]] = [partial(prompts.attend, index) for index in range(len(prompts.q))]
        rivals = {} if self.prefix or self.window else {name: prompts.sdpa(backend) for name, backend in SDPA.items()}
        return Prepared(Timed(calls, lambda: prompts.error(calls[0]), place.bound), rivals)


class _Prompts:
    """Sets of queries, caches and tables of a prefill case. What lies behind the last key is NaN."""

    def __init__(self, case: PrefillAttention, place: Place) -> None:
        self.case, self.bound = case, place.bound
        heads, batch, length = case.heads, case.batch, case.length
        context = case.prefix + length
        copies = place.copies(case.work(place.dtype.itemsize).bytes)
        per_row = -(-context // case.block_size)
        self.q = place.normal(copies, batch * length, heads.num_heads, heads.head_dim)
        shape = copies * batch * per_row, case.block_size, heads.num_kv_heads, heads.head_dim
        self.k_cache, self.v_cache = place.normal(*shape), place.normal(*shape)
        order = torch.randperm(shape[0], device=place.device).to(torch.int32)
        self.tables = order.view(copies, batch, per_row)
        if behind := context % case.block_size:
            for keys_or_values in (self.k_cache, self.v_cache):
                keys_or_values[self.tables[:, :, -1].flatten().long(), behind:] = float("nan")
        portable = PrefillTiling.choose(
            heads.num_heads, heads.head_dim, place.dtype, case.block_size, place.device
        ).portable_rows
        self.tile_rows = portable if case.form == "portable" else HOPPER_TILE_ROWS
        tiles = kernels.prefill_tiles([length] * batch, [context] * batch, self.tile_rows)
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=place.device)
        self.cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=place.device) * length
        self.lens = torch.full((batch,), context, dtype=torch.int32, device=place.device)
        self.scale = heads.head_dim**-0.5
        self.exact = cache(self._exact)

    def attend(self, index: int) -> torch.Tensor:
        return self._attention(kernels.prefill_attention, index)

    def error(self, call: Callable[[], torch.Tensor]) -> float:
        with poisoned_memory():
            return worst_error(call(), self.exact())

    def sdpa(self, backend: SDPBackend) -> Timed:
        """torch's attention of the same prompts, dense and contiguous by token."""

        def dense(cache: torch.Tensor, index: int) -> torch.Tensor:
            rows = cache[self.tables[index].long()].flatten(1, 2)[:, : self.case.length]
            return rows.contiguous().transpose(1, 2)

        @cache
        def inputs(index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            q = self.q[index].unflatten(0, (self.case.batch, -1)).transpose(1, 2)
            return q, dense(self.k_cache, index), dense(self.v_cache, index)

        def call(index: int) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*inputs(index), is_causal=True, enable_gqa=True)

        def error() -> float:
            return worst_error(call(0).transpose(1, 2).flatten(0, 1), self.exact())

        return Timed([partial(call, index) for index in range(len(self.q))], error, self.bound)

    def _exact(self) -> torch.Tensor:
        return self._attention(reference.prefill_attention, 0, wide=True)

    def _attention(self, attention: Callable[..., torch.Tensor], index: int, wide: bool = False) -> torch.Tensor:
        q = self.q[index].float() if wide else self.q[index]
        where = self.tables[index], self.cu_seqlens, self.lens, self.tiles, self.tile_rows
        return attention(q, self.k_cache, self.v_cache, *where, self.scale, window=self.case.window)
