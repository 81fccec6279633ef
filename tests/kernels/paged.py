"""Batches over a paged KV cache whose every element that must not be read is poison."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings

from tritonllm.kernels.launch import interpreting

# Most examples are a shape of their own: seconds of interpretation on a CPU, a compilation on a GPU.
EXAMPLES = settings(max_examples=8 if interpreting() else 20)
_GARBAGE_IDS = torch.tensor([-1, 2**31 - 1], dtype=torch.int32)  # what may follow the used part of a table row


@dataclass(frozen=True)
class Shape:
    """Heads and cache of a case. `heads_first` stores the cache as [block, head, token, D], the op's view permuted."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    heads_first: bool = False

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class PagedBatch:
    """Queries, keys and values of a batch, dense by sequence and as the ops take them."""

    query_lens: list[int]
    contexts: list[int]
    keys: list[torch.Tensor]  # [context, Hkv, D] of each sequence
    values: list[torch.Tensor]
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor

    @property
    def cache(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.k_cache, self.v_cache, self.block_tables


def cu_seqlens(query_lens: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(device)


def paged_batch(
    shape: Shape,
    query_lens: list[int],
    contexts: list[int],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    layout_seed: int = 0,
) -> PagedBatch:
    """A batch with contents from `seed`; `layout_seed` only decides where the blocks lie.

    Free blocks and the unwritten ends of used ones hold NaN and infinities, table ends hold -1 and huge ids, and q is
    a view into wider rows, as it is after a fused projection.
    """
    generator = torch.Generator().manual_seed(seed)
    layout = torch.Generator().manual_seed(layout_seed)
    heads, dim, block_size = shape.num_kv_heads, shape.head_dim, shape.block_size
    counts = [-(-context // block_size) for context in contexts]
    num_blocks = sum(counts) + 2
    tables = _GARBAGE_IDS[torch.randint(0, 2, (len(contexts), max(counts) + 2), generator=layout)]
    free = torch.randperm(num_blocks, generator=layout).to(torch.int32)
    caches = [torch.full((num_blocks, block_size, heads, dim), float("nan")) for _ in range(2)]
    for cache in caches:
        cache[::2] = float("inf")
    dense: list[list[torch.Tensor]] = [[], []]
    for row, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        tables[row, :count], free = free[:count], free[count:]
        positions = torch.arange(context)
        for cache, contents in zip(caches, dense, strict=True):
            contents.append(torch.randn(context, heads, dim, generator=generator).to(dtype).to(device))
            blocks = tables[row].long()[positions // block_size]
            cache[blocks, positions % block_size] = contents[-1].float().cpu()
    wide = torch.randn(sum(query_lens), shape.num_heads + 2 * heads, dim, generator=generator)
    if shape.heads_first:
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    return PagedBatch(
        query_lens=query_lens,
        contexts=contexts,
        keys=dense[0],
        values=dense[1],
        q=wide.to(dtype).to(device)[:, : shape.num_heads],
        k_cache=caches[0].to(dtype).to(device),
        v_cache=caches[1].to(dtype).to(device),
        block_tables=tables.to(device),
        cu_seqlens_q=cu_seqlens(query_lens, device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
    )


def dense_attention(batch: PagedBatch, scale: float) -> torch.Tensor:
    """The same attention in float64 from the dense keys: no cache, no table, every head on its own."""
    out = []
    queries = batch.q.double().cpu().split(batch.query_lens)
    for query, context, keys, values in zip(queries, batch.contexts, batch.keys, batch.values, strict=True):
        group = query.shape[1] // keys.shape[1]
        keys = keys.double().cpu().repeat_interleave(group, 1)
        values = values.double().cpu().repeat_interleave(group, 1)
        positions = torch.arange(context - len(query), context)
        scores = torch.einsum("qhd,nhd->hqn", query, keys) * scale
        scores = scores.masked_fill(torch.arange(context) > positions[:, None], float("-inf"))
        out.append(torch.einsum("hqn,nhd->qhd", scores.softmax(-1), values))
    return torch.cat(out)


def two_large_caches(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches of 8194 blocks of 256 x 8 x 128, and tables [2, 4] of equal blocks: the first four and the last four.

    Block 8192 is the first whose element offset needs more than 31 bits.
    """
    caches = []
    for seed in (1, 2):
        generator = torch.Generator(device).manual_seed(seed)
        cache = torch.full((8194, 256, 8, 128), float("nan"), dtype=torch.bfloat16, device=device)
        cache[:4] = torch.randn(4, 256, 8, 128, generator=generator, device=device)
        cache[-4:] = cache[:4]
        caches.append(cache)
    tables = torch.tensor([[0, 1, 2, 3], [8190, 8191, 8192, 8193]], dtype=torch.int32, device=device)
    return caches[0], caches[1], tables
