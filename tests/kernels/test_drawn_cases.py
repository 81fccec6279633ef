"""The ops as somebody from outside tests them: public names, drawn cases, the shared bounds."""

from __future__ import annotations

import torch
from examples import ON_GPU
from hypothesis import given, settings

from tritonllm import kernels
from tritonllm.kernels import reference
from tritonllm.testing import strategies
from tritonllm.testing.decode_step import DecodeStepCase
from tritonllm.testing.paged import PagedCase
from tritonllm.testing.tensors import RopeCase, StridedCase
from tritonllm.testing.tolerances import tolerance

EXAMPLES = settings(max_examples=30 if ON_GPU else 6)


def workspace_of(case: PagedCase | DecodeStepCase, device: torch.device) -> kernels.DecodeWorkspace:
    shape, rows = case.shape, len(case.contexts)
    return kernels.DecodeWorkspace.allocate(rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, device)


@EXAMPLES
@given(case=strategies.strided_rows(max_tokens=3))
def test_strided_rows(case: StridedCase) -> None:
    x = case.build()
    weight = torch.ones(case.columns, dtype=case.dtype, device=x.device)
    expected = reference.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), expected, **tolerance("rms_norm", case.dtype))


@EXAMPLES
@given(case=strategies.rotations(max_tokens=2))
def test_rotations(case: RopeCase) -> None:
    q, k, *angles = case.build()
    expected = q.clone(), k.clone()
    reference.apply_rope(*expected, *angles)
    kernels.apply_rope(q, k, *angles)
    torch.testing.assert_close((q, k), expected, **tolerance("apply_rope", case.dtype))


@EXAMPLES
@given(case=strategies.paged_batches(max_sequences=2))
def test_paged_batches(case: PagedCase) -> None:
    batch, shape = case.build(), case.shape
    device = batch.q.device
    tiling = kernels.PrefillTiling.choose(shape.num_heads, shape.head_dim, case.dtype, shape.block_size, device)
    rows = tiling.rows(batch.query_lens)
    tiles = torch.tensor(kernels.prefill_tiles(batch.query_lens, batch.contexts, rows), dtype=torch.int32)
    arguments = (
        batch.q, *batch.cache, batch.cu_seqlens_q, batch.context_lens, tiles.view(-1, 2).to(device), rows, shape.scale,
    )  # fmt: skip
    expected = reference.prefill_attention(*arguments)
    bound = tolerance("prefill_attention", case.dtype)
    torch.testing.assert_close(kernels.prefill_attention(*arguments), expected, **bound)


@EXAMPLES
@given(case=strategies.decode_batches(max_sequences=2, max_context=150))
def test_decode_batches(case: PagedCase) -> None:
    batch = case.build()
    arguments = batch.q, *batch.cache, batch.context_lens, case.shape.scale
    expected = reference.decode_attention(*arguments)
    actual = kernels.decode_attention(*arguments, workspace_of(case, batch.q.device))
    torch.testing.assert_close(actual, expected, **tolerance("decode_attention", case.dtype))


@EXAMPLES
@given(case=strategies.decode_steps(max_sequences=2, max_context=100))
def test_decode_steps(case: DecodeStepCase) -> None:
    step = case.build()
    heads_and_scale = case.shape.num_heads, case.shape.scale
    caches, expected_caches = step.caches(), step.caches()
    expected = reference.fused_decode_attention(*step.arguments(expected_caches), *heads_and_scale, **step.norms)
    workspace = workspace_of(case, step.qkv.device)
    actual = kernels.fused_decode_attention(*step.arguments(caches), *heads_and_scale, workspace, **step.norms)
    torch.testing.assert_close(actual, expected, **tolerance("decode_attention", case.dtype))
    bound = tolerance("rope_store_kv", case.dtype)
    torch.testing.assert_close(caches, expected_caches, equal_nan=True, **bound)
