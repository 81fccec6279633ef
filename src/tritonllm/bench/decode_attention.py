"""Decode attention, separate and fused: check, then time: `python -m tritonllm.bench.decode_attention`.

    separate   rope_store_kv, then decode_attention
    fused      fused_decode_attention, everything read after the wait of programmatic dependent launch
    early      the same with lengths, tables and old keys read before that wait

Times are microseconds added to a chain: one CUDA graph of [linear, attention] over rotating caches and weights, minus
the graph of the linears alone, median of replays. The linear stands for the QKV projection, so that what is read early
has something to hide behind. The fraction is that of KV bytes at 4.4 TB/s, what an H200 reads at best.

`--variants` times other tiles of the fused kernel, one change at a time, instead of the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial

import torch
import triton
import triton.language as tl

from tritonllm.bench.graph_timing import PEAK, ROTATED_BYTES, graph_microseconds
from tritonllm.bench.kernels.case import Heads, Place
from tritonllm.bench.kernels.decode_batch import DecodeBatch
from tritonllm.errors import KernelError
from tritonllm.kernels.decode_attention import plan_decode_attention
from tritonllm.kernels.dependent_launch import launch_dependents, wait_for_previous
from tritonllm.kernels.fused_decode_attention import plan_fused_decode_attention
from tritonllm.kernels.fused_decode_table import FusedTile, fused_tile
from tritonllm.kernels.launch import gpu_of, supports_pdl
from tritonllm.kernels.paged_attention import shared_memory_limit
from tritonllm.kernels.reference import attention as reference
from tritonllm.kernels.rope_store import plan_rope_store_kv

BLOCK_SIZE = 256
HIDDEN = 1024
PLACE = Place(torch.device("cuda"), torch.bfloat16)


@triton.jit
def _linear_kernel(  # type: ignore[no-untyped-def]
    weights_ptr, source_ptr, qkv_ptr, batch, width, BLOCK_B: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    """Reads four rows of weights as a projection would, and writes four columns of qkv: those of the source."""
    if PDL:
        launch_dependents()
    column = tl.program_id(0) * 4 + tl.arange(0, 4)
    weights = tl.load(weights_ptr + column.to(tl.int64)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    if PDL:
        wait_for_previous()
    nothing = tl.sum(weights.to(tl.float32), 1) * 0.0
    row = tl.arange(0, BLOCK_B)[:, None]
    offsets = row * width + column[None, :]
    source = tl.load(source_ptr + offsets, mask=row < batch, other=0.0)
    tl.store(qkv_ptr + offsets, (source + nothing[None, :]).to(qkv_ptr.dtype.element_ty), mask=row < batch)


class Bench(DecodeBatch):
    """A decode batch with linears ahead of it, whose weights rotate as the caches do."""

    def __init__(self, heads: Heads, contexts: list[int], calls: int | None = None) -> None:
        # The workspace has room for more splits than the policy makes, which variants may ask for.
        super().__init__(
            heads,
            contexts,
            PLACE,
            BLOCK_SIZE,
            normed=heads.head_dim == 128,
            calls=calls,
            max_batch=max(len(contexts), 16),
        )
        self.source = self.qkv.clone()
        self.out = torch.empty_like(self.q)
        self.weights = PLACE.normal(-(-ROTATED_BYTES // (heads.width * HIDDEN * 2)), heads.width, HIDDEN)
        self.pdl = supports_pdl(self.q.device)

    def tile(self) -> FusedTile:
        heads = self.heads
        return fused_tile(
            len(self.contexts), heads.num_heads, heads.num_kv_heads, heads.head_dim, PLACE.dtype.itemsize,
            self.workspace.num_sms, shared_memory_limit(self.q.device), gpu_of(self.q.device).rdna,
        )  # fmt: skip

    def linear(self, call: int) -> None:
        batch, width = self.source.shape
        _linear_kernel[(width // 4,)](
            self.weights[call % len(self.weights)], self.source, self.qkv, batch, width,
            BLOCK_B=triton.next_power_of_2(batch), COLUMNS=HIDDEN, PDL=self.pdl, num_warps=2,
            **({"launch_pdl": True} if self.pdl else {}),
        )  # fmt: skip

    def separate(self, call: int) -> None:
        caches = self.k_cache, self.v_cache
        plan_rope_store_kv(
            self.qkv, self.cos_sin, self.positions, *caches, self.slots[call], self.q, self.norm, self.norm
        ).run()
        plan_decode_attention(self.q, *caches, self.tables[call], self.lens, self.scale, self.workspace, self.out).run()

    def fused(self, call: int, tile: FusedTile | None = None, early_reads: bool = False) -> None:
        plan_fused_decode_attention(
            self.qkv, self.cos_sin, self.positions, self.k_cache, self.v_cache, self.slots[call], self.tables[call],
            self.lens, self.scale, self.workspace, self.out, self.norm, self.norm, tile=tile, early_reads=early_reads,
        ).run()  # fmt: skip

    def microseconds(self, attend: Callable[[int], None]) -> float:
        """Time that attention adds to a linear."""

        def chain(*steps: Callable[[int], None]) -> float:
            def run() -> None:
                self.out.zero_()  # a launch without PDL ahead of the chain
                for call in range(self.calls):
                    for step in steps:
                        step(call)

            return graph_microseconds(run) / self.calls

        return chain(self.linear, attend) - chain(self.linear)


def check(heads: Heads) -> None:
    """Fused and separate paths against float64 maths on the cache that the separate path wrote."""
    bench = Bench(heads, [1, 2, 255, 256, 257, 700, 1500], calls=1)
    bench.separate(0)
    separate, keys = bench.out.clone(), bench.k_cache.nan_to_num(1e4)  # NaN lies behind the last keys
    exact = reference.decode_attention(
        bench.q.double(), bench.k_cache, bench.v_cache, bench.tables[0], bench.lens, bench.scale
    ).double()
    for name, tile, early in (
        ("separate", None, False),
        ("fused", bench.tile(), False),
        ("early", bench.tile(), True),
        ("early, first tile in registers", replace(bench.tile(), head_start=True), True),
        ("two warps", replace(bench.tile(), keys=32, warps=2, head_start=True), True),
    ):
        if tile is not None:
            bench.poison_new_keys(0)
            bench.out.fill_(float("nan"))
            bench.fused(0, tile, early)
        out = separate if tile is None else bench.out
        error = ((out.double() - exact).norm() / exact.norm()).item()
        moved = (bench.k_cache.nan_to_num(1e4).double() - keys.double()).abs().max().item()
        if not (error < 5e-3 and moved < 0.1) or bench.workspace.counters.any():
            raise KernelError(
                f"{name} {heads}: error {error:.1e}, cache off by {moved:.1e}; do not use these kernels here"
            )


def variants(tile: FusedTile) -> Iterator[tuple[str, FusedTile, bool]]:
    """The tile of the table, then changes of one field or of two that go together."""
    yield "table", tile, False
    yield "table, early", tile, True
    changes: list[dict[str, int | bool]] = [{"head_start": not tile.head_start}]
    changes += [{"splits": splits} for splits in (4, 8, 16, 32)]
    changes += [{"min_tiles": tiles} for tiles in (1, 2, 4)]
    changes += [
        {"keys": 32},
        {"keys": 64, "min_tiles": 1, "stages": 3},
        {"keys": 128, "stages": 2},
        {"keys": 32, "warps": 2},
        {"warps": 2},
        {"warps": 8},
    ]
    changes += [{"stages": stages} for stages in (2, 3, 4)]
    changes += [{"merge_heads": heads} for heads in (1, 2, 4)]
    changes += [
        {"keys": 32, "warps": 2, "stages": 2},
        {"splits": 16, "stages": 2},
        {"splits": 16, "keys": 32, "stages": 2},
    ]
    for change in changes:
        other = replace(tile, **change)  # type: ignore[arg-type]
        if other != tile:
            name = " ".join(f"{key}={value}" for key, value in change.items())
            for early in (False, True):
                yield name + (", early" if early else ""), other, early


def print_variants(bench: Bench, heads: Heads, batch: int, context: int) -> None:
    """Time other tiles of each shape, with and without early reads."""
    print(
        f"{heads}, batch {batch}, context {context}; table:",
        *(f"{f.name}={getattr(bench.tile(), f.name)}" for f in fields(FusedTile)),
    )
    rows = [(bench.microseconds(bench.separate), "separate")]
    for name, tile, early in variants(bench.tile()):
        try:
            rows.append((bench.microseconds(partial(bench.fused, tile=tile, early_reads=early)), name))
        except (KernelError, triton.runtime.errors.OutOfResources) as error:
            print(f"  {name}: {error}")
    for us, name in sorted(rows):
        print(f"  {us:8.2f} us  {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=["16/8x128", "32/8x64", "32/8x128", "9/3x64"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 1024, 8192])
    parser.add_argument("--variants", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "This benchmark needs a CUDA device, and torch sees none.\n")
    for heads in map(Heads.parse, args.heads):
        check(heads)
    if not args.variants:
        print("heads      batch context   separate      fused      early us   fraction of 4.4 TB/s")
    for heads in map(Heads.parse, args.heads):
        for batch in args.batches:
            for context in args.contexts:
                torch.cuda.empty_cache()
                if 2 * heads.kv_bytes(batch * context) + 2 * ROTATED_BYTES > 0.8 * torch.cuda.mem_get_info()[0]:
                    print(f"{heads!s:10} {batch:5} {context:7}   not enough memory")
                    continue
                bench = Bench(heads, [context] * batch)
                if args.variants:
                    print_variants(bench, heads, batch, context)
                    continue
                times = [
                    bench.microseconds(bench.separate),
                    bench.microseconds(bench.fused),
                    bench.microseconds(partial(bench.fused, early_reads=True)),
                ]
                cells = "".join(f"{us:11.2f}" for us in times)
                fractions = " ".join(f"{bench.bytes / us / PEAK:5.2f}" for us in times)
                print(f"{heads!s:10} {batch:5} {context:7}{cells}      {fractions}", flush=True)


if __name__ == "__main__":
    main()
