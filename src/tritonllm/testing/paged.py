"""Batches over a paged KV cache whose every element that must not be read is poison.

A cache is [num_blocks, block_size, Hk, D], of key and of value. Poison is

- NaN or infinity in every block that no sequence has, and behind the last key in the last block of one that does;
- -1 or 2^31 - 1 in every entry of a block table behind the blocks of its sequence;

and q [T, Hq, D] lies in rows of q, k and v heads, as it does after a fused projection, so it is not contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tritonllm.testing.tensors import kernel_device

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
        """Query heads."""
        return self.num_kv_heads * self.group

    @property
    def scale(self) -> float:
        """The usual factor of the scores."""
        return self.head_dim**-0.5


@dataclass(frozen=True)
class PagedBatch:
    """Queries, keys and values of a batch, dense by sequence and as the ops take them.

    Attributes:
        query_lens, contexts: new tokens and all tokens of each sequence, B of each.
        keys, values: [context, Hk, D] of each sequence, what the caches hold of it.
        q: [T, Hq, D], T the sum of query_lens; strided.
        k_cache, v_cache: [num_blocks, block_size, Hk, D].
        block_tables: int32 [B, W], W two more than the longest sequence has blocks.
        cu_seqlens_q: int32 [B + 1].
        context_lens: int32 [B].
    """

    query_lens: list[int]
    contexts: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor

    @property
    def cache(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """k_cache, v_cache and block_tables, which follow each other in the attention ops."""
        return self.k_cache, self.v_cache, self.block_tables


def cu_seqlens(query_lens: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """int32 [B + 1]: where the queries of each sequence begin, and where the last end."""
    return torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(device)


def paged_batch(
    shape: Shape,
    query_lens: Sequence[int],
    contexts: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    layout_seed: int = 0,
) -> PagedBatch:
    """A batch with contents from `seed`; `layout_seed` only decides where the blocks lie and which poison is where.

    Args:
        shape: heads and cache.
        query_lens: new tokens of each sequence, none more than its context.
        contexts: tokens of each sequence with the new ones; 0 for a row that holds none.
        dtype, device: of q and the caches.
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
        query_lens=list(query_lens),
        contexts=list(contexts),
        keys=dense[0],
        values=dense[1],
        q=wide.to(dtype).to(device)[:, : shape.num_heads],
        k_cache=caches[0].to(dtype).to(device),
        v_cache=caches[1].to(dtype).to(device),
        block_tables=tables.to(device),
        cu_seqlens_q=cu_seqlens(query_lens, device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
    )


@dataclass(frozen=True)
class PagedCase:
    """What a batch is made from: small enough to be printed and to be written down again."""

    shape: Shape
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    layout_seed: int = 0

    def build(self, device: torch.device | str | None = None) -> PagedBatch:
        """The batch; default device: `kernel_device()`."""
        return paged_batch(
            self.shape,
            self.query_lens,
            self.contexts,
            self.dtype,
            device or kernel_device(),
            self.seed,
            self.layout_seed,
        )


def poison_unseen(batch: PagedBatch, window: int) -> PagedBatch:
    """The batch with poison in place of every key and value that no query sees through a window of so many keys.

    Table entries of blocks without a key that is seen are poison as well. Caches and tables are those of the batch.
    """
    block_size = batch.k_cache.shape[1]
    for row, (new, context) in enumerate(zip(batch.query_lens, batch.contexts, strict=True)):
        unseen = torch.arange(max(context - new + 1 - window, 0) if new else context)
        blocks = batch.block_tables[row].long().cpu()[unseen // block_size]
        for cache in (batch.k_cache, batch.v_cache):
            cache[blocks, unseen % block_size] = float("nan")
        batch.block_tables[row, : len(unseen) // block_size] = _GARBAGE_IDS[row % 2]
    return batch


def dense_attention(
    batch: PagedBatch, scale: float, window: int | None = None, softcap: float | None = None
) -> torch.Tensor:
    """The same attention in float64 from the dense keys: no cache, no table, every head on its own."""
    out = []
    queries = batch.q.double().cpu().split(batch.query_lens)
    for query, context, keys, values in zip(queries, batch.contexts, batch.keys, batch.values, strict=True):
        group = query.shape[1] // keys.shape[1]
        keys = keys.double().cpu().repeat_interleave(group, 1)
        values = values.double().cpu().repeat_interleave(group, 1)
        positions = torch.arange(context - len(query), context)
        scores = torch.einsum("qhd,nhd->hqn", query, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distances = positions[:, None] - torch.arange(context)
        scores = scores.masked_fill((distances < 0) | (distances >= (window or context)), float("-inf"))
        out.append(torch.einsum("hqn,nhd->qhd", scores.softmax(-1), values))
    return torch.cat(out)
