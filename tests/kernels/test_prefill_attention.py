"""Prefill attention against its reference, and against itself under changes that must not matter."""

from __future__ import annotations

import pytest
import torch
from examples import EXAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st
from large_caches import two_large_caches

from tritonllm.errors import KernelError
from tritonllm.kernels.launch import interpreting
from tritonllm.kernels.prefill_attention import plan_prefill_attention, prefill_attention
from tritonllm.kernels.prefill_tiling import PrefillTiling, prefill_tiles
from tritonllm.kernels.reference import attention as reference
from tritonllm.testing import strategies
from tritonllm.testing.paged import PagedBatch, Shape, cu_seqlens, dense_attention, paged_batch
from tritonllm.testing.tolerances import tolerance

SHARED_MEMORY = (64 * 1024, 227 * 1024)
SHAPES = strategies.shapes(groups=(1, 2, 3))
SEEDS = st.integers(0, 2**16)


def run(batch: PagedBatch, scale: float, shared_memory: int | None = None, by_tma: bool | None = None) -> torch.Tensor:
    _, num_heads, head_dim = batch.q.shape
    rows = PrefillTiling.choose(
        num_heads, head_dim, batch.q.dtype, batch.k_cache.shape[1], batch.q.device
    ).portable_rows
    tiles = prefill_tiles(batch.query_lens, batch.contexts, rows)
    tiles_tensor = torch.tensor(tiles, dtype=torch.int32, device=batch.q.device).reshape(-1, 2)
    arguments = (batch.q, *batch.cache, batch.cu_seqlens_q, batch.context_lens, tiles_tensor, rows, scale)
    if shared_memory is None and by_tma is None:
        return prefill_attention(*arguments)
    out = torch.empty(batch.q.shape, dtype=batch.q.dtype, device=batch.q.device)
    plan_prefill_attention(*arguments, out, shared_memory=shared_memory, by_tma=by_tma).run()
    return out


def expected(batch: PagedBatch, scale: float) -> torch.Tensor:
    return reference.prefill_attention(
        batch.q, *batch.cache, batch.cu_seqlens_q, batch.context_lens, torch.empty(0, 2), 0, scale
    )


@settings(EXAMPLES)
@given(data=st.data(), shape=SHAPES, seed=SEEDS)
def test_matches_reference(
    data: st.DataObject, shape: Shape, seed: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Ragged batches with prefixes and empty rows; whatever is not theirs is poison."""
    dtype = data.draw(st.sampled_from(dtypes))
    lengths = st.tuples(st.integers(0, 40), st.integers(0, 90))
    pairs = data.draw(st.lists(lengths, min_size=1, max_size=3))
    query_lens = [query_len for query_len, _ in pairs]
    contexts = [query_len + prefix for query_len, prefix in pairs]
    shared_memory = data.draw(st.sampled_from(SHARED_MEMORY)) if interpreting() else None
    batch = paged_batch(shape, query_lens, contexts, dtype, device, seed)
    torch.testing.assert_close(
        run(batch, shape.scale, shared_memory), expected(batch, shape.scale), **tolerance("prefill_attention", dtype)
    )


@pytest.mark.skipif(
    not interpreting() and torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="needs TMA: compute capability 9.0",
)
@settings(EXAMPLES)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 150), st.integers(0, 200)), min_size=1, max_size=2),
    block_size=st.sampled_from([64, 128]),
    head_dim=st.sampled_from([16, 64, 128]),
    num_kv_heads=st.integers(1, 2),
    seed=SEEDS,
)
def test_tiles_by_tma_give_the_same_bits(
    pairs: list[tuple[int, int]], block_size: int, head_dim: int, num_kv_heads: int, seed: int, device: torch.device
) -> None:
    """Poison beside and behind a context included: TMA cannot mask what it loads."""
    shape = Shape(num_kv_heads, group=2, head_dim=head_dim, block_size=block_size)
    query_lens = [query_len for query_len, _ in pairs]
    contexts = [query_len + prefix for query_len, prefix in pairs]
    batch = paged_batch(shape, query_lens, contexts, torch.float16, device, seed)
    by_pointers, by_tma = (run(batch, shape.scale, 227 * 1024, by_tma=each) for each in (False, True))
    assert torch.equal(by_tma, by_pointers)
    assert not by_tma.isnan().any()


def test_where_tma_cannot_load_pointers_do(device: torch.device) -> None:
    """Tiles that cross blocks, heads that fill no row of a tile, and float32."""
    for block_size, head_dim, dtype in ((24, 64, torch.float16), (64, 80, torch.float16), (64, 64, torch.float32)):
        shape = Shape(num_kv_heads=1, group=2, head_dim=head_dim, block_size=block_size)
        batch = paged_batch(shape, [70], [170], dtype, device, seed=3)
        arguments = (batch.q, *batch.cache, batch.cu_seqlens_q, batch.context_lens)
        tiles = torch.tensor([[0, 0]], dtype=torch.int32, device=device)
        launch = plan_prefill_attention(*arguments, tiles, 16, 0.1, torch.empty_like(batch.q), by_tma=True)
        assert launch.args["k_desc"] is launch.args["v_desc"] is None


@pytest.mark.parametrize("block_size", [1, 8, 16, 24])
def test_block_boundaries(block_size: int, device: torch.device) -> None:
    contexts = sorted({0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size})
    shape = Shape(num_kv_heads=1, group=2, head_dim=32, block_size=block_size)
    query_lens = [min(context, 1 + row) for row, context in enumerate(contexts)]
    batch = paged_batch(shape, query_lens, contexts, torch.float32, device, seed=1)
    torch.testing.assert_close(
        run(batch, shape.scale), expected(batch, shape.scale), **tolerance("prefill_attention", torch.float32)
    )


@pytest.mark.parametrize(("head_dim", "group"), [(48, 5), (160, 1), (256, 2), (72, 7)])
def test_odd_heads(head_dim: int, group: int, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    shape = Shape(num_kv_heads=1, group=group, head_dim=head_dim, block_size=16)
    for dtype in dtypes:
        batch = paged_batch(shape, [18], [35], dtype, device, seed=2)
        torch.testing.assert_close(
            run(batch, shape.scale), expected(batch, shape.scale), **tolerance("prefill_attention", dtype)
        )


@settings(EXAMPLES)
@given(data=st.data(), seed=SEEDS, length=st.integers(2, 70), prefix=st.integers(0, 20))
def test_chunks_equal_the_whole(
    data: st.DataObject, seed: int, length: int, prefix: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    dtype = data.draw(st.sampled_from(dtypes))
    shape = Shape(num_kv_heads=1, group=2, head_dim=32, block_size=data.draw(st.sampled_from([8, 16, 24])))
    whole = paged_batch(shape, [length], [prefix + length], dtype, device, seed)
    cuts = data.draw(st.lists(st.integers(1, length - 1), max_size=2, unique=True))
    edges = [0, *sorted(cuts), length]
    chunks = []
    for start, stop in zip(edges, edges[1:], strict=False):
        lens, contexts = [stop - start], [prefix + stop]
        chunk = PagedBatch(
            lens,
            contexts,
            whole.keys,
            whole.values,
            whole.q[start:stop],
            *whole.cache,
            cu_seqlens(lens, device),
            torch.tensor(contexts, dtype=torch.int32, device=device),
        )
        chunks.append(run(chunk, shape.scale))
    torch.testing.assert_close(torch.cat(chunks), run(whole, shape.scale), **tolerance("prefill_attention", dtype))


@settings(EXAMPLES)
@given(data=st.data(), shape=SHAPES, seed=SEEDS, layout_seed=st.integers(1, 2**16))
def test_neighbours_and_block_order_do_not_matter(
    data: st.DataObject,
    shape: Shape,
    seed: int,
    layout_seed: int,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Bit for bit: a sequence alone, in other blocks, equals itself in a batch."""
    dtype = data.draw(st.sampled_from(dtypes))
    query_len, prefix = data.draw(st.tuples(st.integers(1, 20), st.integers(0, 40)))
    alone = paged_batch(shape, [query_len], [prefix + query_len], dtype, device, seed)
    many = paged_batch(shape, [query_len, 7], [prefix + query_len, 9], dtype, device, seed, layout_seed)
    many.q[:query_len] = alone.q
    # Contents are drawn in order: the first sequence has the same keys and values in both.
    torch.testing.assert_close(many.keys[0], alone.keys[0], rtol=0, atol=0)
    assert torch.equal(run(many, shape.scale)[:query_len], run(alone, shape.scale))


@settings(EXAMPLES)
@given(shape=SHAPES, seed=SEEDS, pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1))
def test_reference_matches_dense_attention(
    shape: Shape, seed: int, pairs: list[tuple[int, int]], device: torch.device
) -> None:
    pairs = pairs[:4]
    query_lens = [query_len for query_len, _ in pairs]
    contexts = [query_len + prefix for query_len, prefix in pairs]
    batch = paged_batch(shape, query_lens, contexts, torch.float32, device, seed)
    result = expected(batch, shape.scale).cpu()
    torch.testing.assert_close(result, dense_attention(batch, shape.scale).float(), rtol=1e-5, atol=1e-5)


def test_reference_cuts_long_prompts(device: torch.device) -> None:
    """More rows than the reference takes at once, so that the diagonal is cut too."""
    shape = Shape(num_kv_heads=1, group=2, head_dim=16, block_size=64)
    batch = paged_batch(shape, [300], [340], torch.float32, device, seed=3)
    result = expected(batch, shape.scale).cpu()
    torch.testing.assert_close(result, dense_attention(batch, shape.scale).float(), rtol=1e-5, atol=1e-5)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=8),
    tile_rows=st.sampled_from([16, 32, 64, 128]),
)
def test_tiles_cover_every_row_once_heaviest_first(pairs: list[tuple[int, int]], tile_rows: int) -> None:
    query_lens = [query_len for query_len, _ in pairs]
    contexts = [query_len + prefix for query_len, prefix in pairs]
    tiles = prefill_tiles(query_lens, contexts, tile_rows)
    covered = [
        (sequence, row)
        for sequence, first in tiles
        for row in range(first, min(first + tile_rows, query_lens[sequence]))
    ]
    assert sorted(covered) == [(s, row) for s, query_len in enumerate(query_lens) for row in range(query_len)]
    work = [min(contexts[s], contexts[s] - query_lens[s] + first + tile_rows) for s, first in tiles]
    assert work == sorted(work, reverse=True)


def test_refuses_what_it_cannot_take(device: torch.device) -> None:
    shape = Shape(num_kv_heads=2, group=1, head_dim=32, block_size=16)
    batch = paged_batch(shape, [3], [5], torch.float32, device, seed=4)
    tiles = torch.zeros(1, 2, dtype=torch.int32, device=device)
    rest = (batch.block_tables, batch.cu_seqlens_q, batch.context_lens, tiles, 32, shape.scale)
    with pytest.raises(KernelError, match="share a dtype"):
        prefill_attention(batch.q.double(), batch.k_cache, batch.v_cache, *rest)
    with pytest.raises(KernelError, match="multiple of KV heads"):
        prefill_attention(batch.q[:, :1], batch.k_cache, batch.v_cache, *rest)
    with pytest.raises(KernelError, match="head_dim of at most 256"):
        prefill_attention(batch.q[:, :, :16], batch.k_cache, batch.v_cache, *rest)


@pytest.mark.skipif(interpreting(), reason="needs 9 GB of cache: too much for a CPU")
def test_block_offsets_beyond_31_bits(device: torch.device) -> None:
    k_cache, v_cache, tables = two_large_caches(device)
    q = torch.randn(65, 16, 128, device=device).to(torch.bfloat16).repeat(2, 1, 1)
    lens = torch.full((2,), 1000, dtype=torch.int32, device=device)
    for rows in (64, 128):
        tiles = torch.tensor(prefill_tiles([65, 65], [1000, 1000], rows), dtype=torch.int32, device=device)
        out = prefill_attention(q, k_cache, v_cache, tables, cu_seqlens([65, 65], device), lens, tiles, rows, 128**-0.5)
        assert torch.isfinite(out).all()
        assert torch.equal(out[:65], out[65:])
