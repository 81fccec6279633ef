"""Sliding windows and capped scores of the attention ops: against dense attention, with poison outside the window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples import EXAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonllm import kernels
from tritonllm.errors import KernelError
from tritonllm.kernels import reference
from tritonllm.kernels.launch import interpreting
from tritonllm.kernels.prefill_hopper import HOPPER_TILE_ROWS
from tritonllm.testing import strategies
from tritonllm.testing.decode_step import Rotary, Step, decode_step
from tritonllm.testing.paged import PagedBatch, Shape, dense_attention, paged_batch, poison_unseen
from tritonllm.testing.tensors import bits
from tritonllm.testing.tolerances import tolerance

# numpy, under the interpreter, says so when exp2 overflows, which a cap's tanh wants.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")

SEEDS = st.integers(0, 2**16)
SHAPES = strategies.shapes(groups=(1, 2, 3))
WINDOWS = st.one_of(st.none(), st.sampled_from([1, 2, 15, 16, 17, 64]), st.integers(1, 130))
CAPS = st.sampled_from([None, 0.5, 5.0, 50.0])
SMALL = Shape(num_kv_heads=1, group=2, head_dim=32, block_size=16)


def bound_of(op: str, dtype: torch.dtype, softcap: float | None) -> dict[str, float]:
    """With a cap four times the op's bound in float32: tanh is a difference of about 1, times a cap of 50."""
    factor = 4 if softcap is not None and dtype == torch.float32 else 1
    return {name: factor * value for name, value in tolerance(op, dtype).items()}


def prefill(batch: PagedBatch, scale: float, rows: int | None = None, **options: Any) -> torch.Tensor:
    _, num_heads, head_dim = batch.q.shape
    sizes = num_heads, head_dim, batch.q.dtype, batch.k_cache.shape[1], batch.q.device
    rows = rows or kernels.PrefillTiling.choose(*sizes).portable_rows
    tiles = torch.tensor(kernels.prefill_tiles(batch.query_lens, batch.contexts, rows), dtype=torch.int32)
    return kernels.prefill_attention(
        batch.q, *batch.cache, batch.cu_seqlens_q, batch.context_lens, tiles.view(-1, 2).to(batch.q.device), rows,
        scale, **options,
    )  # fmt: skip


def prefill_reference(batch: PagedBatch, scale: float, **options: Any) -> torch.Tensor:
    lens = batch.cu_seqlens_q, batch.context_lens
    return reference.prefill_attention(batch.q, *batch.cache, *lens, torch.empty(0, 2), 0, scale, **options)


def decode(batch: PagedBatch, scale: float, **options: Any) -> torch.Tensor:
    rows, num_heads, head_dim = batch.q.shape
    workspace = kernels.DecodeWorkspace.allocate(rows, num_heads, batch.k_cache.shape[2], head_dim, batch.q.device)
    return kernels.decode_attention(batch.q, *batch.cache, batch.context_lens, scale, workspace, **options)


def fused(step: Step, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape, caches = step.shape, step.caches()
    rows = len(step.batch.contexts)
    workspace = kernels.DecodeWorkspace.allocate(
        rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, step.qkv.device
    )
    arguments = (*step.arguments(caches), shape.num_heads, shape.scale, workspace)
    return kernels.fused_decode_attention(*arguments, **step.norms, **options), *caches


@settings(EXAMPLES)
@given(data=st.data(), shape=SHAPES, seed=SEEDS, window=WINDOWS, softcap=CAPS)
def test_prefill(data, shape, seed, window, softcap, device, dtypes):
    """Ragged chunks behind ragged prefixes; of a batch with a window the rest of the cache is poison."""
    dtype = data.draw(st.sampled_from(dtypes))
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=3))
    query_lens, contexts = [new for new, _ in pairs], [new + cached for new, cached in pairs]
    batch = paged_batch(shape, query_lens, contexts, dtype, device, seed)
    if window is not None:
        poison_unseen(batch, window)
    options = {"window": window, "softcap": softcap}
    expected = dense_attention(batch, shape.scale, **options).to(device, dtype)
    bound = bound_of("prefill_attention", dtype, softcap)
    torch.testing.assert_close(prefill(batch, shape.scale, **options), expected, **bound)
    torch.testing.assert_close(prefill_reference(batch, shape.scale, **options), expected, **bound)


@settings(EXAMPLES)
@given(data=st.data(), shape=SHAPES, seed=SEEDS, window=WINDOWS, softcap=CAPS)
def test_decode(data, shape, seed, window, softcap, device, dtypes):
    dtype = data.draw(st.sampled_from(dtypes))
    contexts = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=3))
    batch = paged_batch(shape, [1] * len(contexts), contexts, dtype, device, seed)
    if window is not None:
        poison_unseen(batch, window)
    options = {"window": window, "softcap": softcap}
    out = decode(batch, shape.scale, **options)
    bound = bound_of("decode_attention", dtype, softcap)
    expected = reference.decode_attention(batch.q, *batch.cache, batch.context_lens, shape.scale, **options)
    torch.testing.assert_close(out, expected, **bound)
    live = [row for row, context in enumerate(contexts) if context]
    dense = dense_attention(batch, shape.scale, **options).to(device, dtype)
    torch.testing.assert_close(out[live], dense[live], **bound)
    assert all(not out[row].any() for row, context in enumerate(contexts) if not context)


@settings(EXAMPLES)
@given(data=st.data(), shape=SHAPES, seed=SEEDS, window=WINDOWS, softcap=CAPS, normed=st.booleans())
def test_fused_decode(data, shape, seed, window, softcap, normed, device, dtypes):
    """Few rows and many, whose first tile is read early or not; the new token counts as one of the window."""
    dtype = data.draw(st.sampled_from(dtypes))
    contexts = data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=3))
    step = decode_step(shape, Rotary(part=1, normed=normed), contexts, dtype, device, seed)
    if window is not None:
        poison_unseen(step.batch, window)
    options = {"window": window, "softcap": softcap}
    out, *caches = fused(step, **options)
    expected_caches = step.caches()
    expected = reference.fused_decode_attention(
        *step.arguments(expected_caches), shape.num_heads, shape.scale, **step.norms, **options
    )
    torch.testing.assert_close(out, expected, **bound_of("decode_attention", dtype, softcap))
    assert torch.equal(bits(caches[1]), bits(expected_caches[1]))


@pytest.mark.parametrize("window", [60, 61, 1000])
def test_a_window_that_holds_all_keys_changes_nothing(window, device, dtypes):
    """Not a bit in the interpreter; two compiled kernels may fuse their multiplications differently."""
    for dtype in dtypes:
        exact = {"rtol": 0, "atol": 0} if interpreting() else tolerance("decode_attention", dtype)
        batch = paged_batch(SMALL, [23, 5], [60, 9], dtype, device, seed=1)
        torch.testing.assert_close(prefill(batch, SMALL.scale, window=window), prefill(batch, SMALL.scale), **exact)
        batch = paged_batch(SMALL, [1, 1], [60, 9], dtype, device, seed=1)
        torch.testing.assert_close(decode(batch, SMALL.scale, window=window), decode(batch, SMALL.scale), **exact)
        step = decode_step(SMALL, Rotary(part=1, normed=True), [60, 9], dtype, device, seed=1)
        torch.testing.assert_close(fused(step, window=window)[0], fused(step)[0], **exact)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_that_were_cut_for_hopper(head_dim, device, dtypes):
    """A layer with a window beside layers without one: same tiles, other form."""
    shape = Shape(num_kv_heads=2, group=2, head_dim=head_dim, block_size=128)
    for dtype in dtypes:
        batch = poison_unseen(paged_batch(shape, [150, 3], [290, 200], dtype, device, seed=6), 70)
        out = prefill(batch, shape.scale, HOPPER_TILE_ROWS, window=70)
        expected = dense_attention(batch, shape.scale, window=70).to(device, dtype)
        torch.testing.assert_close(out, expected, **tolerance("prefill_attention", dtype))


@pytest.mark.parametrize("window", [1, 16, 17, 59])
def test_the_window_of_a_prompt_is_that_of_its_tokens_one_by_one(window, device):
    """A prompt's last token sees what it would see in a decode step; one key more or less would show."""
    batch = paged_batch(SMALL, [60], [60], torch.float32, device, seed=2)
    whole = prefill(batch, SMALL.scale, window=window)
    lens = batch.cu_seqlens_q[:0], batch.context_lens
    one = PagedBatch([1], [60], batch.keys, batch.values, batch.q[59:], *batch.cache, *lens)
    bound = tolerance("decode_attention", torch.float32)
    torch.testing.assert_close(decode(one, SMALL.scale, window=window), whole[59:], **bound)
    for other in (window - 1, window + 1):
        if 1 <= other <= 60:
            assert not torch.allclose(decode(one, SMALL.scale, window=other), whole[59:], **bound)


def test_a_cap_far_above_the_scores_changes_little_and_a_low_one_bounds_them(device):
    batch = paged_batch(SMALL, [1], [80], torch.float32, device, seed=3)
    plain = decode(batch, SMALL.scale)
    torch.testing.assert_close(decode(batch, SMALL.scale, softcap=3e3), plain, atol=2e-3, rtol=0)
    mean = batch.values[0].repeat_interleave(2, 1).mean(0, keepdim=True)
    torch.testing.assert_close(decode(batch, SMALL.scale, softcap=1e-4), mean, atol=1e-3, rtol=0)
    far = decode(batch, 1e6, softcap=2.0)  # whose exponentials overflow
    torch.testing.assert_close(far, dense_attention(batch, 1e6, softcap=2.0).float().to(device), atol=1e-4, rtol=0)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the results of all matrix products that the interpreter computes."""
    from triton.runtime.interpreter import InterpreterBuilder

    found: list[tuple[int, ...]] = []
    create_dot = InterpreterBuilder.create_dot

    def counting(self: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        found.append(acc.data.shape)
        return create_dot(self, a, b, acc, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counting)
    return found


@pytest.mark.skipif(not interpreting(), reason="counts what the interpreter computes")
def test_keys_outside_the_window_cost_no_work(products, device):
    def count(attend: Any, *arguments: Any, **options: Any) -> int:
        products.clear()
        attend(*arguments, **options)
        return len(products)

    context, new = 320, 32
    batch = paged_batch(SMALL, [new], [context], torch.float32, device, seed=4)
    # Two heads, tiles of 16 keys and 32 rows: a tile of rows sees at most 63 keys through a window of 32, or 5 tiles.
    assert count(prefill, batch, SMALL.scale) == 2 * 2 * context // 16
    assert count(prefill, batch, SMALL.scale, window=32) <= 2 * 2 * 5
    batch = paged_batch(SMALL, [1], [context], torch.float32, device, seed=4)
    assert count(decode, batch, SMALL.scale) == 2 * context // 16
    assert count(decode, batch, SMALL.scale, window=32) == 2 * 2
    step = decode_step(SMALL, Rotary(part=1, normed=False), [context], torch.float32, device, seed=4)
    plain = count(fused, step)
    assert plain >= 2 * context // 16
    assert count(fused, step, window=32) <= plain - 2 * (context - 48) // 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1 key or None, got 0"),
        ({"window": -1}, "window must be at least 1 key or None, got -1"),
        ({"softcap": 0.0}, r"softcap must be positive or None, got 0\.0"),
    ],
)
def test_refuses_what_is_no_window_and_no_cap(options, message, device):
    batch = paged_batch(SMALL, [1], [5], torch.float32, device, seed=5)
    step = decode_step(SMALL, Rotary(part=1, normed=False), [5], torch.float32, device, seed=5)
    for attend in (lambda: prefill(batch, 1.0, **options), lambda: decode(batch, 1.0, **options)):
        with pytest.raises(KernelError, match=message):
            attend()
    with pytest.raises(KernelError, match=message):
        fused(step, **options)
