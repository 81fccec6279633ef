"""A step's tensors, made from a plan's integers in one upload."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tritonllm.engine.plan import PrefillChunk, RowUpdate
from tritonllm.engine.sequence import RowSampling
from tritonllm.engine.upload import float_bits, seed_words, upload
from tritonllm.kernels.decode_attention import DecodeWorkspace
from tritonllm.kernels.decode_rows import CONTEXT_LEN, HEADER, SEED, TEMPERATURE, TOKEN, TOP_K, TOP_P
from tritonllm.kernels.prefill_attention import prefill_tiles
from tritonllm.models.attention_metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata


@dataclass(frozen=True)
class SamplingRows:
    """How the next token of each of N rows is chosen: columns of the decode rows, or of a matrix of their form.

    Attributes:
        temperatures: float32 `[N]`.
        top_ks: int32 `[N]`, 0 for off.
        top_ps: float32 `[N]`, 1 for off.
        seeds: int32 `[N, 2]`, low and high word.
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    seeds: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor) -> SamplingRows:
        """Views of int32 rows `[N, >= HEADER]`."""
        floats = rows.view(torch.float32)
        return cls(floats[:, TEMPERATURE], rows[:, TOP_K], floats[:, TOP_P], rows[:, SEED : SEED + 2])


@dataclass(frozen=True)
class StepInputs:
    """One forward pass over T tokens, of which N get a next token.

    Attributes:
        is_prefill: prompt chunks, or decode rows.
        input_ids: int32 `[T]`.
        positions: int32 `[T]`.
        attn: what the attention layers need.
        last_tokens: int32 `[N]`, the tokens whose logits are wanted.
        next_positions: int32 `[N]`, positions of the tokens to be sampled.
        sampling: how they are chosen, None if N is 0.
        plain: all of them greedy or plain temperature.
    """

    is_prefill: bool
    input_ids: torch.Tensor
    positions: torch.Tensor
    attn: AttentionMetadata
    last_tokens: torch.Tensor
    next_positions: torch.Tensor
    sampling: SamplingRows | None
    plain: bool


def pack_row(update: RowUpdate, width: int) -> list[int]:
    """A decode row as 32-bit integers, its table padded to `width`."""
    row = _header(update.token, update.context_len, update.sampling)
    row += update.block_table
    return row + [0] * (width - len(row))


def _header(token: int, context_len: int, sampling: RowSampling) -> list[int]:
    header = [0] * HEADER
    header[TOKEN] = token
    header[CONTEXT_LEN] = context_len
    header[TEMPERATURE] = float_bits(sampling.temperature)
    header[TOP_K] = sampling.top_k
    header[TOP_P] = float_bits(sampling.top_p)
    header[SEED : SEED + 2] = seed_words(sampling.seed)
    return header


def _slots(table: list[int], start: int, stop: int, block_size: int) -> list[int]:
    """Slots of positions `start .. stop - 1`, a block at a time."""
    slots: list[int] = []
    for index in range(start // block_size, -(-stop // block_size)):
        first, base = index * block_size, table[index] * block_size
        slots.extend(range(base + max(start - first, 0), base + min(stop - first, block_size)))
    return slots


def prefill_inputs(chunks: list[PrefillChunk], block_size: int, tile_rows: int, device: torch.device) -> StepInputs:
    """Inputs of prompt chunks, at least one; `tile_rows` is what `prefill_tile_rows` gives for the model."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cu_seqlens = [0]
    last_tokens = []
    next_positions = []
    headers: list[int] = []
    plain = True
    for chunk in chunks:
        ids += chunk.token_ids
        positions += range(chunk.start, chunk.context_len)
        slots += _slots(chunk.block_table, chunk.start, chunk.context_len, block_size)
        cu_seqlens.append(len(ids))
        if chunk.sample:
            last_tokens.append(len(ids) - 1)
            next_positions.append(chunk.context_len)
            headers += _header(-1, chunk.context_len, chunk.sampling)
            plain = plain and chunk.sampling.is_plain
    context_lens = [chunk.context_len for chunk in chunks]
    # A query reads keys up to its own position only: later blocks of the table are not needed.
    width = max(-(-length // block_size) for length in context_lens)
    width += -width % 16
    tables = [
        block_id
        for chunk in chunks
        for block_id in (chunk.block_table[:width] + [0] * (width - len(chunk.block_table)))
    ]
    tiles = prefill_tiles([len(chunk.token_ids) for chunk in chunks], context_lens, tile_rows)
    tensors = upload(
        [
            ids,
            positions,
            slots,
            tables,
            cu_seqlens,
            context_lens,
            [value for tile in tiles for value in tile],
            last_tokens,
            next_positions,
            headers,
        ],
        device,
    )
    attn = PrefillMetadata(
        slot_mapping=tensors[2],
        block_tables=tensors[3].view(len(chunks), width),
        cu_seqlens_q=tensors[4],
        context_lens=tensors[5],
        tiles=tensors[6].view(-1, 2),
        tile_rows=tile_rows,
    )
    sampling = SamplingRows.of(tensors[9].view(-1, HEADER)) if headers else None
    return StepInputs(True, tensors[0], tensors[1], attn, tensors[7], tensors[8], sampling, plain)


def decode_inputs(
    updates: list[RowUpdate], block_size: int, workspace: DecodeWorkspace, device: torch.device
) -> StepInputs:
    """Inputs of one decode step from rows that the host knows whole."""
    width = HEADER + max(len(update.block_table) for update in updates)
    context_lens = [update.context_len for update in updates]
    positions = [length - 1 for length in context_lens]
    slots = [
        update.block_table[position // block_size] * block_size + position % block_size
        for update, position in zip(updates, positions, strict=True)
    ]
    rows, ids, positions_, slots_, context_lens_, last = upload(
        [
            [value for update in updates for value in pack_row(update, width)],
            [update.token for update in updates],
            positions,
            slots,
            context_lens,
            list(range(len(updates))),
        ],
        device,
    )
    matrix = rows.view(len(updates), width)
    attn = DecodeMetadata(slots_, matrix[:, HEADER:], context_lens_, workspace)
    plain = all(update.sampling.is_plain for update in updates)
    return StepInputs(False, ids, positions_, attn, last, context_lens_, SamplingRows.of(matrix), plain)
