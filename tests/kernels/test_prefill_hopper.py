"""The Hopper form of prefill attention against the reference, at lengths that fill its tiles. It has no interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from examples import EXAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonllm.kernels.prefill_attention import plan_prefill_attention
from tritonllm.kernels.prefill_hopper import HOPPER_TILE_ROWS, serves_shape
from tritonllm.kernels.prefill_tiling import PrefillTiling, prefill_tiles
from tritonllm.kernels.reference import attention as reference
from tritonllm.testing.paged import PagedBatch, Shape, paged_batch
from tritonllm.testing.tolerances import tolerance

pytestmark = pytest.mark.skipif(
    not serves_shape(128, torch.bfloat16, 256, torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    reason="needs a Hopper GPU: Gluon has no interpreter",
)
SHAPES = st.builds(
    Shape,
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([64, 128]),
    block_size=st.sampled_from([128, 256]),
)
DTYPES = st.sampled_from([torch.bfloat16, torch.float16])
LENGTHS = st.one_of(st.integers(0, 700), st.sampled_from([1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 384]))
SEEDS = st.integers(0, 2**16)
EDGES = [  # (new tokens, tokens before them); blocks have 128 keys, tiles 128 rows and warpgroups 64 of them
    *[(1, 0), (1, 126), (1, 127), (1, 128), (1, 255)],  # one token, first or last of a block or beside it
    *[(128, 0), (64, 64), (192, 64), (128, 128), (256, 0), (127, 129)],  # the end is a block's
    *[(128, 1), (128, 62), (128, 63), (128, 64), (128, 65), (130, 126), (128, 127)],  # a diagonal in two blocks
    *[(63, 0), (65, 63), (129, 0), (191, 65), (257, 255), (300, 211)],
]


def run(
    batch: PagedBatch, scale: float, padding: int = 0, out: torch.Tensor | None = None, programs: int | None = None
) -> torch.Tensor:
    """The output, in `out` if given, else NaN where nothing was written; `padding` tiles start behind every query.

    `programs` share the tiles; by default as many as the plan says.
    """
    tiles = prefill_tiles(batch.query_lens, batch.contexts, HOPPER_TILE_ROWS) + [(0, 2**30)] * padding
    tiles_tensor = torch.tensor(tiles, dtype=torch.int32, device=batch.q.device).reshape(-1, 2)
    if out is None:
        out = torch.full(batch.q.shape, float("nan"), dtype=batch.q.dtype, device=batch.q.device)
    launch = plan_prefill_attention(
        batch.q, *batch.cache, batch.cu_seqlens_q, batch.context_lens, tiles_tensor, HOPPER_TILE_ROWS, scale, out
    )
    assert launch.kernel.is_gluon() or not len(batch.q)
    (replace(launch, grid=(programs,)) if programs else launch).run()
    return out


def reference_of(batch: PagedBatch, scale: float) -> torch.Tensor:
    return reference.prefill_attention(
        batch.q, *batch.cache, batch.cu_seqlens_q, batch.context_lens, torch.empty(0, 2), 0, scale
    )


@settings(EXAMPLES)
@given(shape=SHAPES, dtype=DTYPES, seed=SEEDS, padding=st.integers(0, 3), data=st.data())
def test_matches_reference(
    shape: Shape, dtype: torch.dtype, seed: int, padding: int, data: st.DataObject, device: torch.device
) -> None:
    """Ragged batches with prefixes; what is not theirs, behind contexts too, is poison."""
    pairs = data.draw(st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=6))
    query_lens = [query_len for query_len, _ in pairs]
    contexts = [query_len + prefix for query_len, prefix in pairs]
    batch = paged_batch(shape, query_lens, contexts, dtype, device, seed)
    expected = reference_of(batch, shape.scale)
    tolerances = tolerance("prefill_attention", dtype)
    torch.testing.assert_close(run(batch, shape.scale, padding), expected, **tolerances)


@settings(EXAMPLES)
@given(shape=SHAPES, dtype=DTYPES, seed=SEEDS, length=st.integers(1, 600), prefix=st.integers(0, 600))
def test_neighbours_and_block_order_do_not_matter(
    shape: Shape, dtype: torch.dtype, seed: int, length: int, prefix: int, device: torch.device
) -> None:
    """Bit for bit: a sequence alone, in other blocks, equals itself in a batch."""
    alone = paged_batch(shape, [length], [prefix + length], dtype, device, seed)
    many = paged_batch(shape, [length, 200, 7], [prefix + length, 500, 9], dtype, device, seed, layout_seed=1)
    many.q[:length] = alone.q
    assert torch.equal(run(many, shape.scale)[:length], run(alone, shape.scale))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_peaks_that_rise_from_block_to_block(head_dim: int, device: torch.device) -> None:
    """Keys grow to the front, where the kernel comes last: what a thread has summed so far decays at every block."""
    shape = Shape(num_kv_heads=2, group=2, head_dim=head_dim, block_size=128)
    batch = paged_batch(shape, [700], [1100], torch.bfloat16, device, seed=1)
    for factor, block in enumerate(reversed(batch.block_tables[0, : -(-1100 // 128)].tolist()), start=1):
        batch.k_cache[block] *= factor / 2
    expected = reference_of(batch, shape.scale)
    torch.testing.assert_close(run(batch, shape.scale), expected, **tolerance("prefill_attention", torch.bfloat16))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_edges_of_blocks_and_tiles(head_dim: int, device: torch.device) -> None:
    """In one batch, alone, and however many programs share the tiles, all of which deal them there and back."""
    shape = Shape(num_kv_heads=1, group=2, head_dim=head_dim, block_size=128)
    query_lens = [query_len for query_len, _ in EDGES]
    contexts = [query_len + prefix for query_len, prefix in EDGES]
    batch = paged_batch(shape, query_lens, contexts, torch.bfloat16, device, seed=1)
    out = run(batch, shape.scale)
    torch.testing.assert_close(out, reference_of(batch, shape.scale), **tolerance("prefill_attention", torch.bfloat16))
    for programs in (1, 2, 3, 7, 50):
        assert torch.equal(run(batch, shape.scale, 2, programs=programs), out), f"{programs} programs"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_key_behind_a_query_is_not_seen_even_if_it_is_nan(head_dim: int, device: torch.device) -> None:
    """One that is left unmasked among hundreds would hardly change a sum: as NaN it cannot be overlooked."""
    shape = Shape(num_kv_heads=1, group=2, head_dim=head_dim, block_size=128)
    prefixes = [0, 1, 62, 63, 64, 65, 126, 127, 128, 190, 191, 254, 300]
    contexts = [prefix + 200 for prefix in prefixes]
    batch = paged_batch(shape, [200] * len(prefixes), contexts, torch.bfloat16, device, seed=1)
    clean = run(batch, shape.scale).unflatten(0, (-1, 200))
    assert clean.isfinite().all()
    for seen in (1, 2, 62, 63, 64, 65, 66, 127, 128, 129, 199):
        k_cache = batch.k_cache.clone()
        for row, (prefix, context) in enumerate(zip(prefixes, contexts, strict=True)):
            behind = torch.arange(prefix + seen, context, device=device)
            k_cache[batch.block_tables[row].long()[behind // 128], behind % 128] = float("nan")
        out = run(replace(batch, k_cache=k_cache), shape.scale).unflatten(0, (-1, 200))
        assert torch.equal(out[:, :seen], clean[:, :seen]), f"{seen} rows"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_of_one_block_come_right_behind_each_other(head_dim: int, device: torch.device) -> None:
    """Many for each program, so that the next queries, keys and values are loaded while those before are in use."""
    shape = Shape(num_kv_heads=1, group=2, head_dim=head_dim, block_size=128)
    lengths = [1, 64, 128, 65, 100] * 20
    batch = paged_batch(shape, lengths, lengths, torch.bfloat16, device, seed=1)
    out = run(batch, shape.scale, programs=2)
    torch.testing.assert_close(out, reference_of(batch, shape.scale), **tolerance("prefill_attention", torch.bfloat16))
    assert torch.equal(run(batch, shape.scale), out)


@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_many_more_tiles_than_programs(num_kv_heads: int, device: torch.device) -> None:
    """Each program takes many tiles of different lengths in turn, and every time gives the same."""
    shape = Shape(num_kv_heads=num_kv_heads, group=4, head_dim=128, block_size=256)
    query_lens = [1500, 1, 130, 700, 64, 1027, 300]
    contexts = [1500, 900, 130, 1000, 65, 2000, 3000]
    batch = paged_batch(shape, query_lens, contexts, torch.bfloat16, device, seed=1)
    expected = reference_of(batch, shape.scale)
    first = run(batch, shape.scale)
    torch.testing.assert_close(first, expected, **tolerance("prefill_attention", torch.bfloat16))
    for _ in range(20):
        assert torch.equal(run(batch, shape.scale), first)


def test_nothing_beside_the_output_is_written(device: torch.device) -> None:
    """Nor do tiles that are not full write where the next sequence's first row is."""
    shape = Shape(num_kv_heads=2, group=2, head_dim=64, block_size=128)
    batch = paged_batch(shape, [100, 3, 130], [100, 200, 150], torch.bfloat16, device, seed=1)
    width = batch.q[0].numel()
    wide = torch.full((len(batch.q) + 2, width + 16), 7.0, dtype=torch.bfloat16, device=device)
    out = wide[1:-1, 8:-8].unflatten(1, batch.q.shape[1:])
    assert torch.equal(run(batch, shape.scale, out=out), run(batch, shape.scale))
    out.fill_(7.0)
    assert (wide == 7.0).all()


def test_rows_may_be_far_apart(device: torch.device) -> None:
    """The third begins 2^31 elements behind the first."""
    shape = Shape(num_kv_heads=1, group=2, head_dim=64, block_size=128)
    batch = paged_batch(shape, [3], [150], torch.bfloat16, device, seed=1)
    far = torch.empty(2**31 + 128, dtype=torch.bfloat16, device=device).as_strided((3, 2, 64), (2**30, 64, 1))
    assert torch.equal(run(batch, shape.scale, out=far), run(batch, shape.scale))


def test_the_engine_asks_for_it_where_it_serves(device: torch.device) -> None:
    def rows(head_dim: int, dtype: torch.dtype, block_size: int, query_lens: list[int]) -> int:
        return PrefillTiling.choose(16, head_dim, dtype, block_size, device).rows(query_lens)

    assert rows(128, torch.bfloat16, 256, [500] * 4) == HOPPER_TILE_ROWS
    assert rows(64, torch.float16, 128, [2048]) == HOPPER_TILE_ROWS
    assert rows(128, torch.bfloat16, 256, [500]) < HOPPER_TILE_ROWS
    assert rows(64, torch.bfloat16, 256, [500] * 4) < HOPPER_TILE_ROWS
    assert rows(80, torch.bfloat16, 256, [4096]) < HOPPER_TILE_ROWS
    assert rows(128, torch.bfloat16, 16, [4096]) < HOPPER_TILE_ROWS
    assert rows(128, torch.float32, 256, [4096]) < HOPPER_TILE_ROWS
