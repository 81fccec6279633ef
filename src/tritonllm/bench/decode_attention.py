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
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
import triton
import triton.language as tl

from tritonllm.bench.graph_timing import PEAK, ROTATED_BYTES, graph_microseconds
from tritonllm.errors import KernelError
from tritonllm.kernels.decode_attention import DecodeWorkspace, plan_decode_attention
from tritonllm.kernels.dependent_launch import launch_dependents, wait_for_previous
from tritonllm.kernels.fused_decode_attention import plan_fused_decode_attention
from tritonllm.kernels.fused_decode_table import FusedTile, fused_tile
from tritonllm.kernels.launch import supports_pdl
from tritonllm.kernels.paged_attention import shared_memory_limit
from tritonllm.kernels.reference import attention as reference
from tritonllm.kernels.rope_store import plan_rope_store_kv

MAX_CALLS = 512
BLOCK_SIZE = 256
HIDDEN = 1024
DTYPE = torch.bfloat16


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


@dataclass(frozen=True)
class Heads:
    """Head shape of a model, written 16/8x128."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Heads:
        heads, _, head_dim = text.partition("x")
        num_heads, _, num_kv_heads = heads.partition("/")
        return cls(int(num_heads), int(num_kv_heads), int(head_dim))

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}"

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def kv_bytes(self, tokens: int) -> int:
        return tokens * self.num_kv_heads * self.head_dim * 2 * DTYPE.itemsize


class Bench:
    """Inputs of one (heads, batch, context): as many caches as it takes to rotate over `ROTATED_BYTES`."""

    def __init__(self, heads: Heads, contexts: list[int], calls: int | None = None) -> None:
        self.heads, self.contexts = heads, contexts
        batch, device = len(contexts), torch.device("cuda")
        blocks = batch * -(-max(contexts) // BLOCK_SIZE)
        self.bytes = heads.kv_bytes(sum(contexts))
        self.calls = calls or min(max(-(-ROTATED_BYTES // self.bytes), 1), MAX_CALLS)
        shape = (self.calls * blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        self.k_cache = torch.empty(shape, dtype=DTYPE, device=device).normal_()
        self.v_cache = torch.empty(shape, dtype=DTYPE, device=device).normal_()
        order = torch.randperm(shape[0], device=device).to(torch.int32)
        self.tables = order.view(self.calls, batch, blocks // batch)
        self.lens = torch.tensor(contexts, dtype=torch.int32, device=device)
        self.positions = self.lens - 1
        last = (self.positions // BLOCK_SIZE).long()[None, :, None].expand(self.calls, -1, -1)
        self.slots = self.tables.gather(2, last)[:, :, 0] * BLOCK_SIZE + self.positions % BLOCK_SIZE
        self.source = torch.randn(batch, heads.width, dtype=DTYPE, device=device)
        self.qkv = self.source.clone()
        angles = torch.rand(max(contexts), heads.head_dim // 2, device=device) * 6.3
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        normed = heads.head_dim == 128  # as in Qwen3
        self.norm = torch.ones(heads.head_dim, dtype=DTYPE, device=device) if normed else None
        self.q = torch.empty(batch, heads.num_heads, heads.head_dim, dtype=DTYPE, device=device)
        self.out = torch.empty_like(self.q)
        self.scale = heads.head_dim**-0.5
        # Allocated for more rows than the batch, so that variants may use more splits than the policy.
        self.workspace = DecodeWorkspace.allocate(
            max(batch, 16), heads.num_heads, heads.num_kv_heads, heads.head_dim, device
        )
        self.weights = torch.randn(
            -(-ROTATED_BYTES // (heads.width * HIDDEN * 2)), heads.width, HIDDEN, dtype=DTYPE, device=device
        )
        self.pdl = supports_pdl(self.q.device)

    def tile(self) -> FusedTile:
        heads = self.heads
        return fused_tile(
            len(self.contexts), heads.num_heads, heads.num_kv_heads, heads.head_dim, DTYPE.itemsize,
            self.workspace.num_sms, shared_memory_limit(self.q.device),
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
    separate, keys = bench.out.clone(), bench.k_cache.clone()
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
            for poisoned in (bench.k_cache, bench.v_cache):  # where the new tokens go
                poisoned.flatten(0, 1)[bench.slots[0].long()] = float("nan")
            bench.out.fill_(float("nan"))
            bench.fused(0, tile, early)
        out = separate if tile is None else bench.out
        error = ((out.double() - exact).norm() / exact.norm()).item()
        moved = (bench.k_cache.double() - keys.double()).abs().max().item()
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
                if heads.kv_bytes(batch * context) + 2 * ROTATED_BYTES > 0.8 * torch.cuda.mem_get_info()[0]:
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
