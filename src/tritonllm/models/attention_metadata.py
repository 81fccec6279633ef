"""What a step tells the attention layers, passed down as an argument: never a global.

A step has up to two segments, decode rows and prefill chunks. Each runs the model once with its own metadata, or both
run it together with `MixedMetadata`: then linear layers and norms see all tokens at once, and attention is a launch for
each segment. All read keys and values through the block table, after the store kernel has written the new ones.

A layer asks three things of its metadata: `slot_mapping`, where new keys and values go; `attend`; and `wanted`, which
picks the rows that the layer's work after attention is for. `attend` gives back the same ones; its `scale`, `window`
and `softcap` are those of the attention ops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tritonllm.kernels.decode_attention import DecodeWorkspace, decode_attention
from tritonllm.kernels.prefill_attention import prefill_attention
from tritonllm.models.decode_path import DecodePath


@dataclass(frozen=True)
class LastTokensMetadata:
    """A prefill's last layer, whose results are wanted for N of T tokens, each the last of its sequence so far.

    Later tokens need the keys and values of all T, but nobody reads the queries, the attention and the MLP of the
    others. A last token sees the whole context, so its attention is that of a decode step. N may be 0.

    Attributes:
        slot_mapping: int32 `[T]`, as in the prefill.
        last_tokens: int32 `[N]`, the wanted tokens among T, in their order.
        sequences: int32 `[N]`, the rows of `block_tables` that they belong to.
        block_tables: int32 `[B, W]`, as in the prefill.
        context_lens: int32 `[N]`, keys of each wanted token; 0 for a padding row.
        workspace: scratch of the split-KV kernel.
    """

    slot_mapping: torch.Tensor
    last_tokens: torch.Tensor
    sequences: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    workspace: DecodeWorkspace

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Attention `[N, heads, head_dim]` of the wanted tokens among q `[T, heads, head_dim]`."""
        # Looked up here and not where the metadata is made: a captured graph has to do it at every replay.
        tables = self.block_tables.index_select(0, self.sequences)
        return decode_attention(
            self.wanted(q), k_cache, v_cache, tables, self.context_lens, scale, self.workspace,
            window=window, softcap=softcap,
        )  # fmt: skip

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        """The rows `[N, ...]` of x `[T, ...]` that belong to the wanted tokens, in memory of their own."""
        return x.index_select(0, self.last_tokens)


@dataclass(frozen=True)
class PrefillMetadata:
    """Prompt chunks of B sequences, T tokens in all; query i of a sequence sits at `context_len - query_len + i`.

    Attributes:
        slot_mapping: int32 `[T]`, where each new key and value goes; -1 for nowhere.
        block_tables: int32 `[B, W]`.
        cu_seqlens_q: int32 `[B + 1]`, first token of each sequence.
        context_lens: int32 `[B]`, keys of each sequence once this chunk is stored.
        tiles: int32 `[N, 2]`, the (sequence, first query row) of every program, heaviest first.
        tile_rows: query rows of a tile.
        last: what the last layer may take instead, if the final hidden states of its tokens are all that is wanted.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    tiles: torch.Tensor
    tile_rows: int
    last: LastTokensMetadata | None = None

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of q `[T, heads, head_dim]`; the same shape comes back."""
        return prefill_attention(
            q,
            k_cache,
            v_cache,
            self.block_tables,
            self.cu_seqlens_q,
            self.context_lens,
            self.tiles,
            self.tile_rows,
            scale,
            window=window,
            softcap=softcap,
        )

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        """x itself: every token goes on."""
        return x


@dataclass(frozen=True)
class DecodeMetadata:
    """One new token for each of B rows; a padding row has slot -1 and context length 0.

    Attributes:
        slot_mapping: int32 `[B]`.
        block_tables: int32 `[B, W]`.
        context_lens: int32 `[B]`, keys of each row with the new token.
        workspace: scratch of the split-KV kernel.
        order: int32 `[B]`, the order in which attention takes the rows, longest context first; None for theirs.
        path: the kernels that a layer of the kit takes; the model sets it for its own layers.
        fused_sums: whether a layer of the kit leaves its sums over the ranks to the norms that follow; likewise.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    workspace: DecodeWorkspace
    order: torch.Tensor | None = None
    path: DecodePath = DecodePath.SEPARATE
    fused_sums: bool = False

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Attention of q `[B, heads, head_dim]` over each row's context; the same shape comes back."""
        lens, order = self.context_lens, self.order
        return decode_attention(
            q, k_cache, v_cache, self.block_tables, lens, scale, self.workspace, order, window=window, softcap=softcap
        )

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        """x itself: every row goes on."""
        return x

    @property
    def num_rows(self) -> int:
        """B, with padding rows."""
        return self.context_lens.shape[0]


@dataclass(frozen=True)
class MixedMetadata:
    """B decode rows and behind them prompt chunks, T tokens in all.

    Attributes:
        decode: of the rows, the first B tokens.
        prefill: of the chunks; its `slot_mapping` and its places of tokens count the rows as well, so that its first
            sequence begins at token B.
    """

    decode: DecodeMetadata
    prefill: PrefillMetadata

    @property
    def slot_mapping(self) -> torch.Tensor:
        """int32 `[T]`, of the rows and the chunks."""
        return self.prefill.slot_mapping

    @property
    def last(self) -> MixedLastMetadata | None:
        """What the last layer may take instead, if only the rows and what the prefill's `last` names are wanted."""
        return None if self.prefill.last is None else MixedLastMetadata(self.decode, self.prefill.last)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Attention of q `[T, heads, head_dim]`, that of the chunks causal; the same shape comes back."""
        num_rows, options = self.decode.num_rows, (k_cache, v_cache, scale, window, softcap)
        attended = self.prefill.attend(q, *options)  # which leaves the rows to us
        attended[:num_rows].copy_(self.decode.attend(q[:num_rows], *options))
        return attended

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        """x itself: every token goes on."""
        return x


@dataclass(frozen=True)
class MixedLastMetadata:
    """The last layer of such a pass: results are wanted for the B rows and the N last tokens that the prefill names.

    Attributes:
        decode: as in `MixedMetadata`.
        prefill: the wanted tokens of the chunks, by their places among all tokens.
    """

    decode: DecodeMetadata
    prefill: LastTokensMetadata

    @property
    def slot_mapping(self) -> torch.Tensor:
        """int32 `[T]`, of the rows and the chunks."""
        return self.prefill.slot_mapping

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Attention `[B + N, heads, head_dim]` of the wanted tokens among q `[T, heads, head_dim]`."""
        options = k_cache, v_cache, scale, window, softcap
        rows = self.decode.attend(q[: self.decode.num_rows], *options)
        return torch.cat([rows, self.prefill.attend(q, *options)])

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        """The rows `[B + N, ...]` of x `[T, ...]` that belong to the wanted tokens, in memory of their own."""
        return torch.cat([x[: self.decode.num_rows], self.prefill.wanted(x)])


AttentionMetadata = PrefillMetadata | DecodeMetadata | LastTokensMetadata | MixedMetadata | MixedLastMetadata
