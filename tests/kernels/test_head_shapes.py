"""Every head size with every group and page size that a model may bring, at lengths around a page."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tritonllm import kernels
from tritonllm.kernels import reference
from tritonllm.kernels.launch import interpreting
from tritonllm.testing.decode_step import DecodeStepCase, Rotary
from tritonllm.testing.paged import PagedCase, Shape
from tritonllm.testing.tolerances import tolerance

HEAD_DIMS = (64, 72, 80, 96, 112, 128, 160, 192, 256)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 24)
BLOCK_SIZES = (1, 8, 16, 24, 48, 64, 256)
# Each head size with each group, the pages taken in turn: with 63 and 70 pairs behind each other all pages meet both.
SHAPES = [
    Shape(num_kv_heads=1 + index % 2, group=group, head_dim=head_dim, block_size=block_size)
    for index, ((head_dim, group), block_size) in enumerate(
        zip(itertools.product(HEAD_DIMS, GROUPS), itertools.cycle(BLOCK_SIZES))
    )
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize(
        "shape", SHAPES, ids=lambda s: f"{s.group}x{s.num_kv_heads}x{s.head_dim}-pages-of-{s.block_size}"
    ),
]


def contexts(shape: Shape) -> tuple[int, ...]:
    """Lengths 0 and 1, and around one page and two, none so long that the interpreter takes seconds."""
    page = shape.block_size if shape.block_size <= 64 else 40
    return (0, 1, page - 1, page, page + 1, 2 * page + 1)


def bound(op: str) -> dict[str, float]:
    return tolerance(op, torch.float32)


def workspace(shape: Shape, rows: int, device: torch.device) -> kernels.DecodeWorkspace:
    space = kernels.DecodeWorkspace.allocate(rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, device)
    return replace(space, num_sms=16) if interpreting() else space  # the splits of a small GPU, one after another


def test_decode(shape: Shape, device: torch.device) -> None:
    lengths = contexts(shape)
    batch = PagedCase(shape, tuple(min(length, 1) or 1 for length in lengths), lengths, torch.float32, 1).build(device)
    arguments = batch.q, *batch.cache, batch.context_lens, shape.scale
    actual = kernels.decode_attention(*arguments, workspace(shape, len(lengths), device))
    torch.testing.assert_close(actual, reference.decode_attention(*arguments), **bound("decode_attention"))


def test_prefill(shape: Shape, device: torch.device) -> None:
    lengths = contexts(shape)
    step = 3 if shape.group < 16 else 1  # the rows of a tile are queries times heads of a group
    queries = tuple(min(length, 1 + index * step) for index, length in enumerate(lengths))
    batch = PagedCase(shape, queries, lengths, torch.float32, 2).build(device)
    tiling = kernels.PrefillTiling.choose(shape.num_heads, shape.head_dim, torch.float32, shape.block_size, device)
    rows = tiling.rows(batch.query_lens)
    tiles = torch.tensor(kernels.prefill_tiles(batch.query_lens, batch.contexts, rows), dtype=torch.int32).view(-1, 2)
    arguments = batch.q, *batch.cache, batch.cu_seqlens_q, batch.context_lens, tiles.to(device), rows, shape.scale
    actual = kernels.prefill_attention(*arguments)
    torch.testing.assert_close(actual, reference.prefill_attention(*arguments), **bound("prefill_attention"))


def test_fused_decode(shape: Shape, device: torch.device) -> None:
    lengths = contexts(shape)
    step = DecodeStepCase(shape, Rotary(part=1, normed=True), lengths, torch.float32, 3).build(device)
    caches, expected_caches = step.caches(), step.caches()
    heads = shape.num_heads, shape.scale
    expected = reference.fused_decode_attention(*step.arguments(expected_caches), *heads, **step.norms)
    space = workspace(shape, len(lengths), device)
    actual = kernels.fused_decode_attention(*step.arguments(caches), *heads, space, **step.norms)
    torch.testing.assert_close(actual, expected, **bound("decode_attention"))
    torch.testing.assert_close(caches, expected_caches, equal_nan=True, **bound("rope_store_kv"))
