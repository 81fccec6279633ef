"""Decode attention against its reference, and against itself under changes that must not matter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from examples import EXAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st
from large_caches import two_large_caches

from tritonllm.errors import KernelError
from tritonllm.kernels.decode_attention import (
    DecodeWorkspace,
    decode_attention,
    plan_decode_attention,
)
from tritonllm.kernels.decode_splits import decode_grid, distinct_batches, key_tile
from tritonllm.kernels.launch import Launch, interpreting
from tritonllm.kernels.prefill_attention import prefill_attention
from tritonllm.kernels.prefill_tiling import PrefillTiling, prefill_tiles
from tritonllm.kernels.reference import attention as reference
from tritonllm.testing import strategies
from tritonllm.testing.paged import PagedBatch, Shape, dense_attention, paged_batch
from tritonllm.testing.tolerances import tolerance

SHARED_MEMORY = (64 * 1024, 227 * 1024)
SHAPES = strategies.shapes()
SEEDS = st.integers(0, 2**16)


def workspace_for(batch: PagedBatch, splits: int | None = None) -> DecodeWorkspace:
    """A workspace for this batch; `splits` makes room for a number of splits that the policy would not choose."""
    rows, num_heads, head_dim = batch.q.shape
    workspace = DecodeWorkspace.allocate(rows, num_heads, batch.k_cache.shape[2], head_dim, batch.q.device)
    if splits is None:
        return workspace
    parts = rows * splits * num_heads
    return replace(
        workspace,
        partial_out=torch.empty(parts * head_dim, device=batch.q.device),
        partial_stats=torch.empty(parts * 2, device=batch.q.device),
    )


def run(batch: PagedBatch, scale: float, splits: int | None = None, shared_memory: int | None = None) -> torch.Tensor:
    workspace = workspace_for(batch, splits)
    out = torch.empty(batch.q.shape, dtype=batch.q.dtype, device=batch.q.device)
    launch = plan_decode_attention(
        batch.q,
        *batch.cache,
        batch.context_lens,
        scale,
        workspace,
        out,
        num_splits=splits,
        shared_memory=shared_memory,
    )
    launch.run()
    assert not workspace.counters.any(), "the counters must be ready for the next call"
    return out


def expected(batch: PagedBatch, scale: float) -> torch.Tensor:
    return reference.decode_attention(batch.q, *batch.cache, batch.context_lens, scale)


def one_query_each(
    shape: Shape, contexts: list[int], dtype: torch.dtype, device: torch.device, seed: int, layout_seed: int = 0
) -> PagedBatch:
    return paged_batch(shape, [1] * len(contexts), contexts, dtype, device, seed, layout_seed)


@settings(EXAMPLES)
@given(data=st.data(), shape=SHAPES, seed=SEEDS, contexts=st.lists(st.integers(0, 300), min_size=1, max_size=3))
def test_matches_reference(
    data: st.DataObject,
    shape: Shape,
    seed: int,
    contexts: list[int],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Mixed lengths with empty rows; whatever is not theirs is poison."""
    dtype = data.draw(st.sampled_from(dtypes))
    shared_memory = data.draw(st.sampled_from(SHARED_MEMORY)) if interpreting() else None
    batch = one_query_each(shape, contexts, dtype, device, seed)
    torch.testing.assert_close(
        run(batch, shape.scale, data.draw(st.sampled_from([1, 4, 8])), shared_memory),
        expected(batch, shape.scale),
        **tolerance("decode_attention", dtype),
    )


@pytest.mark.parametrize("block_size", [1, 8, 16, 24])
def test_block_boundaries(block_size: int, device: torch.device) -> None:
    """The public op, its own number of splits, twice over one workspace."""
    contexts = sorted({0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size})
    shape = Shape(num_kv_heads=1, group=3, head_dim=32, block_size=block_size)
    batch = one_query_each(shape, contexts, torch.float32, device, seed=1)
    workspace = workspace_for(batch)
    for _ in range(2):
        out = decode_attention(batch.q, *batch.cache, batch.context_lens, shape.scale, workspace)
        assert not out[0].any(), "context 0 must give exactly zero"
        torch.testing.assert_close(out, expected(batch, shape.scale), **tolerance("decode_attention", torch.float32))


@pytest.mark.parametrize(("head_dim", "group"), [(48, 5), (160, 1), (256, 2), (72, 24), (64, 71)])
def test_odd_heads(head_dim: int, group: int, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    shape = Shape(num_kv_heads=1, group=group, head_dim=head_dim, block_size=16)
    for dtype in dtypes:
        batch = one_query_each(shape, [50], dtype, device, seed=2)
        torch.testing.assert_close(
            run(batch, shape.scale, splits=4), expected(batch, shape.scale), **tolerance("decode_attention", dtype)
        )


def test_split_counts_agree(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """More splits than tiles of keys, as many, and fewer."""
    shape = Shape(num_kv_heads=1, group=2, head_dim=32, block_size=16)
    for dtype in dtypes:
        batch = one_query_each(shape, [1, 17, 65, 400], dtype, device, seed=3)
        whole = run(batch, shape.scale, splits=1)
        for splits in (2, 8, 32):
            torch.testing.assert_close(run(batch, shape.scale, splits), whole, **tolerance("decode_attention", dtype))


@settings(EXAMPLES)
@given(data=st.data(), shape=SHAPES, seed=SEEDS, layout_seed=st.integers(1, 2**16), context=st.integers(1, 200))
def test_neighbours_and_block_order_do_not_matter(
    data: st.DataObject,
    shape: Shape,
    seed: int,
    layout_seed: int,
    context: int,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Bit for bit: a sequence alone, in other blocks, equals itself in a batch with the same splits."""
    dtype = data.draw(st.sampled_from(dtypes))
    alone = one_query_each(shape, [context], dtype, device, seed)
    many = one_query_each(shape, [context, 0, 33], dtype, device, seed, layout_seed)
    many.q[:1] = alone.q
    assert torch.equal(run(many, shape.scale, splits=4)[:1], run(alone, shape.scale, splits=4))


@settings(EXAMPLES)
@given(data=st.data(), seed=SEEDS, context=st.integers(1, 150))
def test_equals_the_last_row_of_prefill(
    data: st.DataObject, seed: int, context: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    dtype = data.draw(st.sampled_from(dtypes))
    shape = Shape(num_kv_heads=1, group=2, head_dim=32, block_size=data.draw(st.sampled_from([8, 16, 24])))
    query_len = min(context, data.draw(st.integers(1, 40)))
    batch = paged_batch(shape, [query_len], [context], dtype, device, seed)
    rows = PrefillTiling.choose(shape.num_heads, shape.head_dim, dtype, shape.block_size, device).portable_rows
    tiles = torch.tensor(prefill_tiles([query_len], [context], rows), dtype=torch.int32, device=device)
    prefilled = prefill_attention(
        batch.q, *batch.cache, batch.cu_seqlens_q, batch.context_lens, tiles, rows, shape.scale
    )
    last = replace(batch, query_lens=[1], q=batch.q[-1:])
    torch.testing.assert_close(run(last, shape.scale, splits=4), prefilled[-1:], **tolerance("decode_attention", dtype))


def test_a_row_of_nan_stays_alone(device: torch.device) -> None:
    shape = Shape(num_kv_heads=1, group=2, head_dim=32, block_size=16)
    batch = one_query_each(shape, [40, 40], torch.float32, device, seed=4)
    clean = run(batch, shape.scale, splits=4)
    batch.q[0] = float("nan")
    spoilt = run(batch, shape.scale, splits=4)
    assert spoilt[0].isnan().all()
    assert torch.equal(spoilt[1], clean[1])


@settings(EXAMPLES)
@given(shape=SHAPES, seed=SEEDS, contexts=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_reference_matches_dense_attention(shape: Shape, seed: int, contexts: list[int], device: torch.device) -> None:
    batch = one_query_each(shape, contexts, torch.float32, device, seed)
    result = expected(batch, shape.scale).cpu()
    torch.testing.assert_close(result, dense_attention(batch, shape.scale).float(), rtol=1e-5, atol=1e-5)


def planned(
    batch: int, num_heads: int, num_kv_heads: int, head_dim: int, num_sms: int, shared_memory: int | None = None
) -> Launch:
    """A launch on meta tensors, in bfloat16."""

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    scratch = empty(2**40, dtype=torch.float32)
    workspace = DecodeWorkspace(scratch, scratch, empty(2**20), num_sms)
    cache = empty(4, 16, num_kv_heads, head_dim, dtype=torch.bfloat16)
    q = empty(batch, num_heads, head_dim, dtype=torch.bfloat16)
    return plan_decode_attention(
        q, cache, cache, empty(batch, 16), empty(batch), 0.125, workspace, torch.empty_like(q),
        shared_memory=shared_memory,
    )  # fmt: skip


@given(
    batch=st.integers(1, 512),
    num_kv_heads=st.integers(1, 32),
    head_dim=st.sampled_from([64, 80, 128, 256]),
    num_sms=st.sampled_from([16, 84, 108, 132, 304]),
)
def test_splits_are_few_powers_of_two(batch: int, num_kv_heads: int, head_dim: int, num_sms: int) -> None:
    """Fewer as the batch grows, until they are for sequences of more than 2,048 keys alone."""
    grid, larger = (decode_grid(rows, num_kv_heads, head_dim, num_sms) for rows in (batch, batch + 1))
    assert grid.splits in (2, 4, 8, 16, 32)
    assert larger.splits <= grid.splits or larger.min_keys == 2048 > grid.min_keys


@pytest.mark.parametrize(
    ("heads", "cuts"),
    [
        (
            (16, 8, 128),
            {
                1: (32, 1, 32, 3, 2), 2: (16, 1, 64, 4, 4), 4: (8, 1, 64, 4, 4), 8: (2, 1, 128, 3, 8),
                16: (2, 1, 64, 4, 4), 32: (2, 1, 64, 4, 4), 64: (4, 32, 64, 4, 4), 96: (4, 32, 64, 3, 4),
                256: (4, 32, 64, 3, 4),
            },
        ),
        (
            (32, 8, 64),
            {
                1: (32, 1, 64, 3, 2), 8: (8, 1, 64, 4, 4), 64: (2, 1, 64, 4, 4), 256: (4, 32, 64, 3, 4),
            },
        ),
        ((14, 2, 64), {8: (32, 1, 64, 3, 4)}),
    ],
)  # fmt: skip
def test_cuts_measured_best_on_an_h200(
    heads: tuple[int, int, int], cuts: dict[int, tuple[int, int, int, int, int]]
) -> None:
    """Splits, tiles before another one joins, keys of a tile, stages and warps by batch."""

    def cut(batch: int) -> tuple[int, int, int, int, int]:
        launch = planned(batch, *heads, num_sms=132, shared_memory=227 * 1024)
        names = ("SPLITS", "MIN_TILES", "BLOCK_N")
        return (*(launch.constexprs[name] for name in names), launch.options["num_stages"], launch.options["num_warps"])

    assert {batch: cut(batch) for batch in cuts} == cuts


@pytest.mark.parametrize("kib", [48, 64, 99, 163, 227])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_programs_of_deep_pipelines_share_an_sm(kib: int, head_dim: int) -> None:
    for batch in (1, 2, 4, 8, 16, 64, 256):
        grid = decode_grid(batch, 8, head_dim, 132)
        keys, stages = key_tile(grid, 16, head_dim, 2, kib * 1024)
        programs = grid.programs if stages > 2 and keys > 32 else 1
        assert programs * (2 * keys * (stages - 1) + 16) * head_dim * 2 <= kib * 1024


@pytest.mark.parametrize("num_sms", [20, 132, 300])
@pytest.mark.parametrize("shared_memory", SHARED_MEMORY)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (16, 8), (9, 3), (8, 1), (64, 64)])
def test_distinct_batches_compile_all_kernels(
    num_heads: int, num_kv_heads: int, shared_memory: int, num_sms: int
) -> None:
    """Whatever the batch, a launch differs from one of theirs in nothing but grid and tensors."""

    def kernel(batch: int) -> str:
        launch = planned(batch, num_heads, num_kv_heads, 64, num_sms, shared_memory)
        numbers = {name: value for name, value in launch.args.items() if not isinstance(value, torch.Tensor)}
        return repr((numbers, launch.constexprs, launch.options))

    distinct = distinct_batches(300, num_kv_heads, 64, num_sms)
    kernels = [kernel(batch) for batch in distinct]
    if shared_memory == max(SHARED_MEMORY):  # with less of it, what differs may not fit, and the same is left
        assert len(set(kernels)) == len(kernels)
    assert {kernel(batch) for batch in range(1, 301)} == set(kernels)
    assert distinct_batches(distinct[-1] - 1, num_kv_heads, 64, num_sms) == distinct[:-1]


def test_refuses_what_it_cannot_take(device: torch.device) -> None:
    shape = Shape(num_kv_heads=1, group=1, head_dim=32, block_size=16)
    batch = one_query_each(shape, [3, 4], torch.float32, device, seed=5)
    small = DecodeWorkspace.allocate(1, 1, 1, 32, device)
    with pytest.raises(KernelError, match="workspace is too small"):
        decode_attention(batch.q, *batch.cache, batch.context_lens, shape.scale, small)
    with pytest.raises(KernelError, match="context_lens must be contiguous int32"):
        decode_attention(batch.q, *batch.cache, batch.context_lens.long(), shape.scale, workspace_for(batch))


@pytest.mark.skipif(interpreting(), reason="needs 9 GB of cache: too much for a CPU")
def test_block_offsets_beyond_31_bits(device: torch.device) -> None:
    k_cache, v_cache, tables = two_large_caches(device)
    q = torch.randn(1, 16, 128, device=device).to(torch.bfloat16).repeat(2, 1, 1)
    lens = torch.full((2,), 1000, dtype=torch.int32, device=device)
    workspace = DecodeWorkspace.allocate(2, 16, 8, 128, device)
    out = decode_attention(q, k_cache, v_cache, tables, lens, 128**-0.5, workspace)
    assert torch.isfinite(out).all()
    assert torch.equal(out[0], out[1])


@pytest.mark.skipif(interpreting(), reason="CUDA graphs need a GPU")
def test_one_graph_serves_every_length(device: torch.device) -> None:
    shape = Shape(num_kv_heads=2, group=4, head_dim=64, block_size=16)
    batch = one_query_each(shape, [2000, 1500], torch.bfloat16, device, seed=6)
    workspace = workspace_for(batch)

    def attend() -> torch.Tensor:
        return decode_attention(batch.q, *batch.cache, batch.context_lens, shape.scale, workspace)

    attend()  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for lens in ([2000, 1500], [0, 1], [17, 0], [64, 1000]):
        batch.context_lens.copy_(torch.tensor(lens))
        graph.replay()
        assert torch.equal(out, attend())
        torch.testing.assert_close(out, expected(batch, shape.scale), **tolerance("decode_attention", torch.bfloat16))
