"""Fused decode attention against the two ops it replaces, and against itself under changes that must not matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from examples import EXAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonllm.errors import KernelError
from tritonllm.kernels.decode_attention import DecodeWorkspace, decode_attention
from tritonllm.kernels.fused_decode_attention import fused_decode_attention, plan_fused_decode_attention
from tritonllm.kernels.fused_decode_table import FusedTile, fused_tile
from tritonllm.kernels.launch import interpreting
from tritonllm.kernels.reference import attention as reference
from tritonllm.kernels.rope_store import rope_store_kv
from tritonllm.testing import strategies
from tritonllm.testing.decode_step import Rotary, Step, decode_step
from tritonllm.testing.paged import Shape
from tritonllm.testing.tensors import bits
from tritonllm.testing.tolerances import tolerance

SEEDS = st.integers(0, 2**16)
TILE = FusedTile(splits=4, min_tiles=1, keys=16, stages=2, warps=4, merge_heads=1, head_start=False)
TILES = st.builds(
    FusedTile,
    splits=st.sampled_from([1, 4, 8]),
    min_tiles=st.sampled_from([1, 2]),
    keys=st.sampled_from([16, 32, 64]),
    stages=st.sampled_from([1, 2, 3]),
    warps=st.sampled_from([2, 4]),
    merge_heads=st.sampled_from([1, 2]),
    head_start=st.booleans(),
    save_registers=st.booleans(),
)


SHAPES = strategies.shapes(groups=(1, 2, 3, 7))
ROTARIES = st.builds(Rotary, part=st.sampled_from([1, 1, 2]), normed=st.booleans())


def workspace_for(step: Step, splits: int | None = None) -> DecodeWorkspace:
    """A workspace for this step; `splits` makes room for a number of splits that the policy would not choose."""
    shape, rows = step.shape, len(step.batch.contexts)
    workspace = DecodeWorkspace.allocate(rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, step.qkv.device)
    if splits is None:
        return workspace
    parts = rows * splits * shape.num_heads
    return replace(
        workspace,
        partial_out=torch.empty(parts * shape.head_dim, device=step.qkv.device),
        partial_stats=torch.empty(parts * 2, device=step.qkv.device),
    )


def run(step: Step, tile: FusedTile = TILE, **options: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and caches after the fused op."""
    shape, caches = step.shape, step.caches()
    workspace = workspace_for(step, tile.splits)
    out = torch.empty(
        len(step.batch.contexts), shape.num_heads, shape.head_dim, dtype=step.qkv.dtype, device=step.qkv.device
    )
    plan_fused_decode_attention(
        *step.arguments(caches), shape.scale, workspace, out, **step.norms, tile=tile, **options
    ).run()
    assert not workspace.counters.any(), "the counters must be ready for the next call"
    return out, *caches


def separate(step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and caches after the op that rotates and writes, then the reference of the one that attends."""
    caches = step.caches()
    q = rope_store_kv(step.qkv, step.cos_sin, step.positions, *caches, step.slots, step.shape.num_heads, **step.norms)
    out = reference.decode_attention(q, *caches, step.batch.block_tables, step.batch.context_lens, step.shape.scale)
    return out, *caches


def assert_same(
    actual: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    exact_keys: bool,
) -> None:
    """Outputs within the bound of attention; caches, poison included, bit for bit.

    On a GPU two kernels may sum the squares of a norm in two orders: there a normed key only has to be close.
    """
    torch.testing.assert_close(actual[0], expected[0], **tolerance("decode_attention", actual[0].dtype))
    if exact_keys or interpreting():
        assert torch.equal(bits(actual[1]), bits(expected[1]))
    else:
        bound = tolerance("rope_store_kv", actual[1].dtype)
        torch.testing.assert_close(actual[1], expected[1], equal_nan=True, **bound)
    assert torch.equal(bits(actual[2]), bits(expected[2]))


@settings(EXAMPLES)
@given(
    data=st.data(),
    shape=SHAPES,
    rotary=ROTARIES,
    tile=TILES,
    seed=SEEDS,
    contexts=st.lists(st.integers(0, 200), min_size=1, max_size=3),
)
def test_equals_the_separate_ops(
    data: st.DataObject,
    shape: Shape,
    rotary: Rotary,
    tile: FusedTile,
    seed: int,
    contexts: list[int],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Mixed lengths with empty rows; whatever is not theirs is poison, and so is the new token's place."""
    dtype = data.draw(st.sampled_from(dtypes))
    step = decode_step(shape, rotary, contexts, dtype, device, seed)
    assert_same(run(step, tile), separate(step), exact_keys=not rotary.normed)


@pytest.mark.parametrize("block_size", [1, 8, 16, 24])
def test_block_boundaries(block_size: int, device: torch.device) -> None:
    """The public op with its own tile."""
    contexts = sorted({0, 1, 2, max(block_size - 1, 1), block_size, block_size + 1})
    shape = Shape(num_kv_heads=1, group=2, head_dim=32, block_size=block_size)
    step = decode_step(shape, Rotary(part=1, normed=True), contexts, torch.float32, device, seed=1)
    workspace, caches = workspace_for(step), step.caches()
    out = fused_decode_attention(*step.arguments(caches), shape.num_heads, shape.scale, workspace, **step.norms)
    assert not out[0].any(), "context 0 must give exactly zero"
    assert_same((out, *caches), separate(step), exact_keys=False)


@pytest.mark.parametrize(("head_start", "save_registers"), [(False, False), (True, False), (False, True)])
def test_equals_decode_attention(
    head_start: bool, save_registers: bool, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    """The kernel it replaces, rather than its reference, on tiles of the same size."""
    shape = Shape(num_kv_heads=2, group=3, head_dim=64, block_size=16)
    for dtype in dtypes:
        step = decode_step(shape, Rotary(part=2, normed=False), [70, 1], dtype, device, seed=2)
        caches = step.caches()
        q = rope_store_kv(step.qkv, step.cos_sin, step.positions, *caches, step.slots, shape.num_heads)
        out = decode_attention(
            q, *caches, step.batch.block_tables, step.batch.context_lens, shape.scale, workspace_for(step)
        )
        tile = replace(TILE, head_start=head_start, save_registers=save_registers)
        assert_same(run(step, tile), (out, *caches), exact_keys=True)


@pytest.mark.parametrize(("head_dim", "group"), [(48, 5), (160, 1), (256, 2), (72, 24), (64, 71)])
def test_odd_heads(head_dim: int, group: int, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    shape = Shape(num_kv_heads=1, group=group, head_dim=head_dim, block_size=16)
    for dtype in dtypes:
        step = decode_step(shape, Rotary(part=1, normed=True), [50], dtype, device, seed=3)
        assert_same(run(step), separate(step), exact_keys=False)


def test_tiles_agree(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """More splits than tiles, as many, fewer; tiles of all sizes; the first tile read early or in the loop."""
    shape = Shape(num_kv_heads=1, group=2, head_dim=32, block_size=64)
    for dtype in dtypes:
        step = decode_step(shape, Rotary(part=1, normed=True), [1, 17, 130], dtype, device, seed=4)
        whole = run(step, replace(TILE, splits=1, keys=64))
        for splits, keys, head_start in ((2, 64, True), (8, 32, False), (32, 16, True)):
            tile = replace(TILE, splits=splits, keys=keys, head_start=head_start)
            assert_same(run(step, tile), whole, exact_keys=True)


@settings(EXAMPLES)
@given(
    data=st.data(), shape=SHAPES, rotary=ROTARIES, seed=SEEDS, layout=st.integers(1, 2**16), context=st.integers(1, 99)
)
def test_neighbours_and_block_order_do_not_matter(
    data: st.DataObject,
    shape: Shape,
    rotary: Rotary,
    seed: int,
    layout: int,
    context: int,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Bit for bit: a sequence alone, in other blocks, equals itself in a batch with the same tiles."""
    dtype = data.draw(st.sampled_from(dtypes))
    alone = decode_step(shape, rotary, [context], dtype, device, seed)
    many = decode_step(shape, rotary, [context, 0, 33], dtype, device, seed, layout)
    many = replace(many, cos_sin=alone.cos_sin, norms=alone.norms)
    many.qkv[:1] = alone.qkv
    assert torch.equal(run(many)[0][:1], run(alone)[0])


def test_padding_rows_and_skipped_slots(device: torch.device) -> None:
    """Nothing is written for a context of 0, whatever its slot, nor for slot -1; other rows do not notice."""
    shape = Shape(num_kv_heads=1, group=2, head_dim=32, block_size=16)
    step = decode_step(shape, Rotary(part=1, normed=True), [20, 40, 5], torch.float32, device, seed=5)
    full = run(step)
    step.qkv[2] = float("nan")
    step.batch.context_lens[2] = 0
    step.slots[1] = -1
    out, k_cache, v_cache = run(step)
    assert torch.equal(out[0], full[0][0])
    assert not out[2].any()
    for written, cache, before in zip((k_cache, v_cache), full[1:], step.caches(), strict=True):
        block, offset = divmod(int(step.slots[0]), shape.block_size)
        before[block, offset] = cache[block, offset]
        assert torch.equal(bits(written), bits(before))


def test_position_need_not_be_the_last_of_the_context(device: torch.device) -> None:
    shape = Shape(num_kv_heads=1, group=2, head_dim=32, block_size=16)
    step = decode_step(shape, Rotary(part=1, normed=False), [20, 1], torch.float32, device, seed=6)
    step.positions += 300
    assert_same(run(step), separate(step), exact_keys=True)


def test_a_row_of_nan_stays_alone(device: torch.device) -> None:
    shape = Shape(num_kv_heads=1, group=2, head_dim=32, block_size=16)
    step = decode_step(shape, Rotary(part=1, normed=True), [40, 40], torch.float32, device, seed=7)
    clean = run(step)[0]
    step.qkv[0] = float("nan")
    spoilt = run(step)[0]
    assert spoilt[0].isnan().all()
    assert torch.equal(spoilt[1], clean[1])


def test_tiles_measured_best_on_an_h200() -> None:
    """Splits, keys and stages, tiles before another program joins, warps, and whether the first one is in registers."""
    tiles = {batch: fused_tile(batch, 16, 8, 128, 2, 132, 227 * 1024) for batch in (1, 2, 4, 8, 16, 32, 64, 96, 256)}
    assert {
        batch: (tile.splits, tile.keys, tile.stages, tile.min_tiles, tile.warps, tile.head_start)
        for batch, tile in tiles.items()
    } == {
        1: (32, 32, 2, 1, 4, True),
        2: (16, 64, 3, 1, 4, True),
        4: (8, 64, 4, 1, 4, False),
        8: (2, 128, 3, 1, 8, False),
        16: (2, 64, 4, 1, 4, False),
        32: (2, 64, 4, 1, 4, False),
        64: (4, 64, 4, 32, 4, False),
        96: (4, 64, 3, 32, 4, False),
        256: (4, 64, 3, 32, 4, False),
    }


def test_a_first_tile_in_registers_needs_the_memory_of_a_deep_pipeline() -> None:
    """What it takes to hand it to the tensor cores passes through shared memory."""
    tiles = {kib: fused_tile(2, 16, 8, 128, 2, 132, kib * 1024) for kib in (48, 99, 163, 227)}
    assert {kib: (tile.keys, tile.stages, tile.head_start) for kib, tile in tiles.items()} == {
        48: (64, 2, False), 99: (64, 2, False), 163: (64, 2, True), 227: (64, 3, True),
    }  # fmt: skip


def test_refuses_what_it_cannot_take(device: torch.device) -> None:
    shape = Shape(num_kv_heads=1, group=1, head_dim=32, block_size=16)
    step = decode_step(shape, Rotary(part=1, normed=True), [3, 4], torch.float32, device, seed=8)
    caches, workspace = step.caches(), workspace_for(step)

    def attend(changed: Step, **options: Any) -> None:
        fused_decode_attention(*changed.arguments(caches), 1, shape.scale, workspace, **options)

    with pytest.raises(KernelError, match="give q_norm and k_norm, or neither"):
        attend(step, q_norm=step.norms["q_norm"])
    with pytest.raises(KernelError, match="q_norm and k_norm must be contiguous"):
        attend(step, q_norm=step.norms["q_norm"][:16], k_norm=step.norms["k_norm"])
    with pytest.raises(KernelError, match=r"qkv must be torch.float32 \[2, 96\]"):
        attend(replace(step, qkv=step.qkv[:, :64]))
    with pytest.raises(KernelError, match="slot_mapping must be a contiguous int32"):
        attend(replace(step, slots=step.slots.long()))
    small = DecodeWorkspace.allocate(1, 1, 1, 32, device)
    with pytest.raises(KernelError, match="workspace is too small"):
        fused_decode_attention(*step.arguments(caches), 1, shape.scale, small)


@pytest.mark.skipif(interpreting(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("early_reads", [False, True])
def test_one_graph_serves_every_length(early_reads: bool, device: torch.device) -> None:
    """Several dependent launches in one graph; the copies ahead of them are launches without PDL."""
    shape = Shape(num_kv_heads=2, group=4, head_dim=64, block_size=16)
    dtype = torch.bfloat16
    step = decode_step(shape, Rotary(part=1, normed=True), [500, 300], dtype, device, seed=9)
    layers = [step.caches() for _ in range(4)]
    outs = [torch.empty(2, shape.num_heads, shape.head_dim, dtype=dtype, device=device) for _ in layers]
    workspace = workspace_for(step)
    lens, positions = step.batch.context_lens, step.positions
    upload = torch.stack([lens, positions, step.slots])

    def attend() -> None:
        for target, source in zip((lens, positions, step.slots), upload, strict=True):
            target.copy_(source)
        for caches, out in zip(layers, outs, strict=True):
            plan_fused_decode_attention(
                *step.arguments(caches), shape.scale, workspace, out, **step.norms, early_reads=early_reads
            ).run()

    attend()  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for contexts in ([500, 300], [1, 0], [17, 64], [480, 255]):
        other = decode_step(shape, Rotary(part=1, normed=True), contexts, dtype, device, seed=9)
        slots = [
            int(step.batch.block_tables[row, (context - 1) // 16]) * 16 + (context - 1) % 16 if context else -1
            for row, context in enumerate(contexts)
        ]
        upload.copy_(torch.tensor([contexts, other.positions.tolist(), slots]))
        for caches in layers:
            for cache, start in zip(caches, step.caches(), strict=True):
                cache.copy_(start)
        graph.replay()
        for out, caches in zip(outs, layers, strict=True):
            assert_same((out, *caches), separate(step), exact_keys=False)
