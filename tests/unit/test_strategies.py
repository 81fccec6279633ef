"""`tritonllm.testing.strategies`: what is drawn is what the docstring says, and it finds the faults that it is for."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonllm.config import RopeConfig
from tritonllm.kernels import reference
from tritonllm.models import rope
from tritonllm.testing import strategies
from tritonllm.testing.decode_step import DecodeStepCase
from tritonllm.testing.paged import PagedBatch, PagedCase, dense_attention
from tritonllm.testing.poison import poisoned_memory
from tritonllm.testing.sampling_rows import DISTRIBUTIONS, LogitsCase, SamplingCase, logits_row
from tritonllm.testing.tensors import RopeCase, StridedCase, bits, exact_dtypes, rope_table
from tritonllm.testing.tolerances import BOUNDS, tolerance

FEW = settings(max_examples=25, deadline=None)
NEVER_READ = [-1, 2**31 - 1]


def test_the_example_runs() -> None:
    tried = doctest.testmod(strategies)
    assert tried.attempted >= 8
    assert tried.failed == 0


def test_the_docstring_names_every_strategy_of_cases() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", strategies.__doc__, re.MULTILINE)
    public = {name for name, value in vars(strategies).items() if callable(value) and name[0].islower()}
    ours = {name for name in public if getattr(strategies, name).__module__ == strategies.__name__}
    assert set(listed) == ours - {"dtypes", "shapes", "lengths"}


def test_without_hypothesis_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['hypothesis'] = None; import tritonllm.testing.strategies"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: tritonllm.testing.strategies needs hypothesis")
    assert "pip install 'tritonllm-engine[testing]'" in last


def hidden(batch: PagedBatch) -> torch.Tensor:
    """bool [num_blocks, block_size]: the rows of the cache that belong to no token."""
    block_size = batch.k_cache.shape[1]
    free = torch.ones(batch.k_cache.shape[:2], dtype=torch.bool)
    for row, context in enumerate(batch.contexts):
        for token in range(context):
            free[batch.block_tables[row, token // block_size], token % block_size] = False
    return free


@FEW
@given(case=st.one_of(strategies.paged_batches(), strategies.decode_batches()))
def test_paged_batches_hold_their_sequences_and_poison_elsewhere(case: PagedCase) -> None:
    batch = case.build("cpu")
    assert batch.q.shape == (sum(case.query_lens), case.shape.num_heads, case.shape.head_dim)
    assert batch.q.dtype == batch.k_cache.dtype == batch.v_cache.dtype == case.dtype
    assert batch.cu_seqlens_q.tolist() == [sum(case.query_lens[:row]) for row in range(len(case.query_lens) + 1)]
    assert batch.context_lens.tolist() == list(case.contexts)
    free = hidden(batch)
    assert int((~free).sum()) == sum(case.contexts)  # no two sequences share a row
    for cache in (batch.k_cache, batch.v_cache):
        assert not cache[free].isfinite().any()
        assert cache[~free].isfinite().all()
    for row, context in enumerate(case.contexts):
        used = -(-context // case.shape.block_size)
        assert set(batch.block_tables[row, used:].tolist()) <= set(NEVER_READ)
        slots = torch.arange(context)
        blocks = batch.block_tables[row].long()[slots // case.shape.block_size]
        assert torch.equal(batch.k_cache[blocks, slots % case.shape.block_size], batch.keys[row])


@FEW
@given(case=strategies.decode_batches(min_context=1, dtype=strategies.dtypes([torch.float32])))
def test_a_batch_is_made_from_its_case_alone_and_its_layout_from_the_layout_s_seed(case: PagedCase) -> None:
    one, again = case.build("cpu"), case.build("cpu")
    assert torch.equal(bits(one.k_cache), bits(again.k_cache))
    assert torch.equal(one.block_tables, again.block_tables)
    scale = case.shape.scale
    expected = dense_attention(one, scale).float()
    actual = reference.decode_attention(one.q, *one.cache, one.context_lens, scale)
    torch.testing.assert_close(actual, expected, **tolerance("decode_attention", torch.float32))


@FEW
@given(case=strategies.decode_steps())
def test_decode_steps_keep_the_new_token_out_of_the_cache(case: DecodeStepCase) -> None:
    step = case.build("cpu")
    k_cache, v_cache = step.caches()
    for row, context in enumerate(case.contexts):
        slot = int(step.slots[row])
        assert (slot == -1) == (context == 0)
        if context:
            for cache in (k_cache, v_cache):
                assert cache[slot // case.shape.block_size, slot % case.shape.block_size].isnan().all()
    assert k_cache.stride() == step.batch.k_cache.stride()
    out = reference.fused_decode_attention(
        *step.arguments((k_cache, v_cache)), case.shape.num_heads, case.shape.scale, **step.norms
    )
    assert out.isfinite().all()
    assert not out[step.batch.context_lens == 0].any()


@FEW
@given(case=strategies.rotations())
def test_rotations(case: RopeCase) -> None:
    q, k, positions, cos_sin = case.build("cpu")
    assert q.shape == (len(case.positions), case.num_heads, case.head_dim)
    assert k.shape == (len(case.positions), case.num_kv_heads, case.head_dim)
    assert cos_sin.shape[1] == case.rotary_dim <= case.head_dim
    assert case.rotary_dim % 2 == 0
    assert positions.tolist() == list(case.positions)
    before = q.float().square().sum(-1)
    reference.apply_rope(q, k, positions, cos_sin)
    torch.testing.assert_close(q.float().square().sum(-1), before, rtol=0.05, atol=0.05)


def test_the_rotary_table_is_the_one_of_models() -> None:
    expected = rope.rope_table(RopeConfig(rotary_dim=64, theta=10000.0, original_max_position=512), 512, "cpu")
    torch.testing.assert_close(rope_table(512, 64), expected, rtol=0, atol=1e-4)


@FEW
@given(case=strategies.strided_rows())
def test_strided_rows_have_nan_between_them(case: StridedCase) -> None:
    rows = case.build("cpu")
    assert rows.shape == (case.tokens, case.columns)
    assert rows.isfinite().all()
    if case.tokens:
        assert rows.stride() == (case.columns + case.padding, 1)
        wide = rows.as_strided((case.tokens, case.columns + case.padding), rows.stride())
        assert wide[:, case.columns :].isnan().all()


@FEW
@given(case=strategies.logits())
def test_logits_have_infinity_between_them(case: LogitsCase) -> None:
    logits = case.build("cpu")
    assert logits.shape == (len(case.distributions), case.vocab_size)
    assert logits.isfinite().all()
    beyond = logits.as_strided((len(logits), logits.stride(0)), logits.stride())[:, case.vocab_size :]
    assert beyond.numel()
    assert (beyond == torch.inf).all()


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_are_what_they_are_called(name: str | float) -> None:
    shares = logits_row(name, 4099, seed=3).double().softmax(0).sort(descending=True).values
    if isinstance(name, float):
        assert float(shares[0]) == pytest.approx(name, rel=1e-3)
    if name in ("equal", "flat"):
        assert shares[0] < 1.2 * shares[-1]
    if name == "zipf":
        assert float(shares[0]) == pytest.approx(10 * float(shares[9]), rel=1e-3)


@FEW
@given(case=strategies.sampling_batches())
def test_sampling_batches_have_a_parameter_a_row(case: SamplingCase) -> None:
    logits, rows = case.build("cpu")
    assert rows.temperatures.tolist() == pytest.approx(case.temperatures)
    assert rows.top_ks.tolist() == list(case.top_ks)
    assert rows.top_ps.tolist() == pytest.approx(case.top_ps)
    assert all(0 <= token < case.logits.vocab_size for token in rows.sample(logits))


@FEW
@given(data=st.data(), block_size=st.sampled_from(strategies.BLOCK_SIZES), longest=st.integers(0, 300))
def test_lengths_stay_in_their_range(data: st.DataObject, block_size: int, longest: int) -> None:
    shortest = data.draw(st.integers(0, longest))
    assert shortest <= data.draw(strategies.lengths(block_size, longest, shortest)) <= longest


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_lengths_are_often_at_the_end_of_a_block(offset: int) -> None:
    hypothesis.find(strategies.lengths(64, 200), lambda length: length > 100 and (length - offset) % 64 == 0)


def wrong_about_the_tail(batch: PagedBatch, scale: float) -> torch.Tensor:
    """Masks weights after the product's operands were loaded: 0 times what was never written."""
    return attention(batch, scale, lambda weights, valid: weights * valid)


def wrong_about_blocks(batch: PagedBatch, scale: float) -> torch.Tensor:
    """Takes the blocks of a sequence to lie one after the other."""
    tables = batch.block_tables[:, :1] + torch.arange(batch.block_tables.shape[1])
    tables = tables.clamp(0, len(batch.k_cache) - 1)
    return reference.decode_attention(batch.q, batch.k_cache, batch.v_cache, tables, batch.context_lens, scale)


def wrong_about_heads(batch: PagedBatch, scale: float) -> torch.Tensor:
    """Deals query heads out to key-value heads in turn."""
    order = torch.arange(batch.q.shape[1]).view(-1, batch.k_cache.shape[2]).T.flatten()
    out = reference.decode_attention(batch.q[:, order], *batch.cache, batch.context_lens, scale)
    return out[:, order.argsort()]


def attention(batch: PagedBatch, scale: float, mask: Callable[..., torch.Tensor]) -> torch.Tensor:
    out = torch.zeros_like(batch.q)
    for row, length in enumerate(batch.contexts):
        if length == 0:
            continue
        used = -(-length // batch.k_cache.shape[1])
        k, v = (cache[batch.block_tables[row, :used]].flatten(0, 1).float() for cache in batch.cache[:2])
        valid = torch.arange(len(k)) < length
        scores = torch.einsum("hgd,nhd->hgn", batch.q[row].float().view(k.shape[1], -1, k.shape[2]), k) * scale
        weights = mask(scores.masked_fill(~valid, -torch.inf).softmax(-1), valid)
        out[row] = torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1).to(out.dtype)
    return out


@pytest.mark.parametrize("wrong", [wrong_about_the_tail, wrong_about_blocks, wrong_about_heads])
def test_usual_faults_are_found(wrong: Callable[..., torch.Tensor]) -> None:
    def fails(case: Any) -> bool:
        batch = case.build("cpu")
        expected = reference.decode_attention(batch.q, *batch.cache, batch.context_lens, case.shape.scale)
        bound = tolerance("decode_attention", case.dtype)
        return not torch.allclose(wrong(batch, case.shape.scale), expected, **bound)

    case = hypothesis.find(strategies.decode_batches(), fails, settings=settings(max_examples=30, deadline=None))
    assert eval(repr(case), {**vars(sys.modules["tritonllm.testing.paged"]), "torch": torch}) == case


def test_bounds_have_reasons_and_other_ops_are_named() -> None:
    assert all(bound.reason for bound in BOUNDS.values())
    assert set(BOUNDS) <= set(reference.__all__)
    with pytest.raises(ValueError, match="there is no bound for 'store_kv', only for rms_norm"):
        tolerance("store_kv", torch.float32)


def test_bfloat16_is_drawn_where_it_is_computed() -> None:
    assert set(exact_dtypes()) == {torch.float32, torch.float16, torch.bfloat16}  # this lane does not interpret


def test_memory_is_poisoned_inside_and_only_there() -> None:
    before = torch.empty, torch.empty_like, torch.Tensor.new_empty
    with poisoned_memory():
        for floats in (torch.empty(3), torch.empty_like(torch.zeros(3)), torch.zeros(1).new_empty(3)):
            assert floats.isnan().all()
        assert torch.empty(2, dtype=torch.int32).tolist() == [-(2**31)] * 2
        assert torch.empty(2, device="meta").shape == (2,)
    assert (torch.empty, torch.empty_like, torch.Tensor.new_empty) == before
