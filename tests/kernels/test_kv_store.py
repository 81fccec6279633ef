"""Cache writes: what is stored comes back bit for bit, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.errors import KernelError
from tritonllm.kernels.kv_store import store_kv
from tritonllm.kernels.reference import elementwise
from tritonllm.testing.tensors import Draw, bits

SEEDS = st.integers(0, 2**31)


@given(
    data=st.data(),
    seed=SEEDS,
    tokens=st.integers(0, 8),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([16, 64, 80, 96, 256]),
    block_size=st.sampled_from([1, 3, 16]),
    heads_first=st.booleans(),
)
def test_stores_into_slots_and_nowhere_else(
    data, seed, tokens, kv_heads, head_dim, block_size, heads_first, device, dtypes
):
    dtype = data.draw(st.sampled_from(dtypes))
    draw = Draw(seed, device)
    blocks = 12 // block_size + 2
    k_cache, v_cache = draw.caches(blocks, block_size, kv_heads, head_dim, heads_first, dtype)
    slots = draw.slots(tokens, blocks * block_size)
    qkv = draw.normal(tokens, 4 + 2 * kv_heads, head_dim, dtype=dtype)
    _, k, v = qkv.split((4, kv_heads, kv_heads), dim=1)

    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    elementwise.store_kv(k, v, expected_k, expected_v, slots)
    store_kv(k, v, k_cache, v_cache, slots)

    # Bits, so that the untouched NaNs of the caches count as equal.
    assert torch.equal(bits(k_cache), bits(expected_k))
    assert torch.equal(bits(v_cache), bits(expected_v))
    # And not through the reference: gather what was stored.
    kept = slots >= 0
    block, offset = slots[kept] // block_size, slots[kept] % block_size
    assert torch.equal(bits(k_cache[block, offset]), bits(k[kept]))
    assert torch.equal(bits(v_cache[block, offset]), bits(v[kept]))
    assert int(k_cache.isnan().all(dim=-1).sum()) == (blocks * block_size - int(kept.sum())) * kv_heads


@given(data=st.data(), seed=SEEDS, tokens=st.integers(2, 8))
def test_order_of_tokens_does_not_matter(data, seed, tokens, device):
    """Storing all at once equals storing in two calls."""
    draw = Draw(seed, device)
    once, twice = (draw.caches(3, 4, 2, 16, False, torch.float32) for _ in range(2))
    slots = draw.slots(tokens, 12)
    k, v = draw.normal(tokens, 2, 16), draw.normal(tokens, 2, 16)
    cut = data.draw(st.integers(0, tokens))
    store_kv(k, v, *once, slots)
    store_kv(k[cut:], v[cut:], *twice, slots[cut:])
    store_kv(k[:cut], v[:cut], *twice, slots[:cut])
    for left, right in zip(once, twice, strict=True):
        assert torch.equal(bits(left), bits(right))


def test_special_bits_survive(device):
    """NaN payloads, infinities, negative zero and subnormals are copied, not computed."""
    patterns = torch.tensor([0x7E01, 0x7C00, -0x8000, 0x0001], dtype=torch.int16, device=device)
    k = patterns.view(torch.float16).reshape(1, 1, 4)
    k_cache, v_cache = (torch.zeros(1, 2, 1, 4, dtype=torch.float16, device=device) for _ in range(2))
    store_kv(k, k, k_cache, v_cache, torch.tensor([1], dtype=torch.int32, device=device))
    assert torch.equal(bits(k_cache)[0, 1, 0], patterns)
    assert torch.equal(bits(v_cache)[0, 1, 0], patterns)


@pytest.mark.parametrize(
    ("cache_shape", "cache_dtype", "slots_dtype", "message"),
    [
        ((2, 4, 3, 16), torch.float32, torch.int32, "k_cache must be"),
        ((2, 4, 2, 16), torch.float16, torch.int32, "the caches must match"),
        ((2, 4, 2, 16), torch.float32, torch.int64, "slot_mapping must be a contiguous int32"),
    ],
)
def test_refuses_what_does_not_fit(cache_shape, cache_dtype, slots_dtype, message, device):
    k = torch.zeros(3, 2, 16, device=device)
    cache = torch.zeros(cache_shape, dtype=cache_dtype, device=device)
    with pytest.raises(KernelError, match=message):
        store_kv(k, k, cache, cache, torch.zeros(3, dtype=slots_dtype, device=device))
