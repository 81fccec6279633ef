"""The order of a decode batch: a stable sort by falling length, and no influence on what attention computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.errors import KernelError
from tritonllm.kernels.decode_attention import DecodeWorkspace, decode_attention
from tritonllm.kernels.fused_decode_attention import fused_decode_attention
from tritonllm.kernels.launch import interpreting
from tritonllm.kernels.longest_first import longest_first
from tritonllm.kernels.reference import elementwise
from tritonllm.testing.paged import Shape, paged_batch
from tritonllm.testing.tensors import bits

LENGTHS = st.one_of(st.integers(0, 5), st.integers(0, 2**31 - 1))


@given(lengths=st.lists(LENGTHS, max_size=40))
def test_sorts_and_keeps_equals_in_their_order(lengths: list[int], device: torch.device) -> None:
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    order = longest_first(context_lens).tolist()
    assert order == sorted(range(len(lengths)), key=lambda index: -lengths[index])
    assert order == elementwise.longest_first(context_lens.cpu()).tolist()


@pytest.mark.parametrize("batch", [256, 257, 600])
def test_more_rows_than_a_program_compares_at_once(batch: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(batch)
    context_lens = torch.randint(0, 50, (batch,), generator=generator).to(device, torch.int32)
    assert longest_first(context_lens).tolist() == elementwise.longest_first(context_lens.cpu()).tolist()


@given(seed=st.integers(0, 2**16), contexts=st.lists(st.integers(0, 90), min_size=1, max_size=5))
def test_attention_gives_the_same_bits_in_any_order(seed: int, contexts: list[int], device: torch.device) -> None:
    shape = Shape(num_kv_heads=2, group=2, head_dim=16, block_size=16)
    batch = paged_batch(shape, [min(length, 1) for length in contexts], contexts, torch.float32, device, seed)
    rows = len(contexts)
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(rows, (4 + 2 * 2) * 16, generator=generator).to(device)
    angles = torch.rand(128, 8, generator=generator).to(device)
    lens = batch.context_lens
    positions = (lens - 1).clamp(min=0)
    entries = batch.block_tables.gather(1, (positions // 16).long()[:, None])[:, 0]
    slots = torch.where(lens > 0, entries * 16 + positions % 16, -1).to(torch.int32)
    results = []
    backwards = torch.arange(rows, dtype=torch.int32, device=device).flip(0).contiguous()
    for order in (None, longest_first(lens), backwards):
        workspace = DecodeWorkspace.allocate(rows, 4, 2, 16, device)
        if interpreting():  # by each program in turn: as many as serve a small GPU, from 4 to 16 splits
            workspace = replace(workspace, num_sms=16)
        fused = fused_decode_attention(
            qkv, torch.cat([angles.cos(), angles.sin()], 1), positions, batch.k_cache, batch.v_cache, slots,
            batch.block_tables, lens,
            4, 0.25, workspace, order=order,
        )  # fmt: skip
        separate = decode_attention(fused, *batch.cache, lens, 0.25, workspace, order)
        results.append((bits(fused), bits(separate)))
    for fused, separate in results[1:]:
        assert torch.equal(fused, results[0][0])
        assert torch.equal(separate, results[0][1])


def test_refuses_what_is_no_order(device: torch.device) -> None:
    with pytest.raises(KernelError, match=r"longest_first: context_lens must be contiguous int32 \[B\]"):
        longest_first(torch.zeros(3, device=device))
    shape = Shape(num_kv_heads=2, group=2, head_dim=16, block_size=16)
    batch = paged_batch(shape, [1, 1], [5, 6], torch.float32, device, 0)
    workspace = DecodeWorkspace.allocate(2, 4, 2, 16, device)
    short = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(KernelError, match=r"order must be contiguous int32 \[2\] or None, not int32\[1\]"):
        decode_attention(batch.q, *batch.cache, batch.context_lens, 0.25, workspace, short)
