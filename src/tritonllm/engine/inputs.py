"""A step's tensors, made from a plan's integers in one upload."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch

from tritonllm.engine.control_state import ControlledRow, ControlState
from tritonllm.engine.plan import PrefillChunk, RowUpdate, choice_of_chunks
from tritonllm.engine.sequence import Choice, RowSampling
from tritonllm.engine.upload import ALIGNMENT, float_bits, seed_words, to_device, upload
from tritonllm.errors import EngineError
from tritonllm.kernels.decode_attention import DecodeWorkspace
from tritonllm.kernels.decode_rows import CONTEXT_LEN, HEADER, SEED, TEMPERATURE, TOKEN, TOP_K, TOP_P, load_rows
from tritonllm.kernels.prefill_tiling import PrefillTiling, prefill_tiles
from tritonllm.kernels.row_layout import (
    CONTROLS,
    FREQUENCY_PENALTY,
    HAS_MASK,
    HAS_PENALTIES,
    MIN_P,
    NUM_BAD_WORDS,
    NUM_BIASES,
    NUM_LOGPROBS,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
)
from tritonllm.models.attention_metadata import (
    AttentionMetadata,
    DecodeMetadata,
    LastTokensMetadata,
    MixedMetadata,
    PrefillMetadata,
)

_BEHIND_EVERY_QUERY = 2**30


@dataclass(frozen=True)
class SamplingRows:
    """How the next token of each of N rows is chosen: columns of the decode rows, or of a matrix of their form.

    Attributes:
        temperatures: float32 `[N]`.
        top_ks: int32 `[N]`, 0 for off.
        top_ps: float32 `[N]`, 1 for off.
        min_ps: float32 `[N]`, 0 for off.
        seeds: int32 `[N, 2]`, low and high word.
        headers: int32 `[N, >= HEADER]`, all of these.
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    seeds: torch.Tensor
    headers: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor) -> SamplingRows:
        """Views of int32 rows `[N, >= HEADER]`."""
        floats = rows.view(torch.float32)
        seeds = rows[:, SEED : SEED + 2]
        return cls(floats[:, TEMPERATURE], rows[:, TOP_K], floats[:, TOP_P], floats[:, MIN_P], seeds, rows)


@dataclass(frozen=True)
class StepInputs:
    """One forward pass over T tokens, of which N get a next token.

    Attributes:
        is_prefill: prompt chunks, or decode rows.
        input_ids: int32 `[T]`.
        positions: int32 `[T]`.
        attn: what the attention layers need, for the hidden states of all T tokens.
        last_tokens: int32 `[N]`, the tokens whose logits are wanted.
        last_sequences: int32 `[N]`, their sequences, as rows of the block tables.
        next_positions: int32 `[N]`, positions of the tokens to be sampled.
        sampling: how they are chosen, None if N is 0.
        choice: what choosing them takes.
        controlled: those of the N rows that have controls.
        followed: `(index of a token, the tokens of its prompt from the next one on)` for each prompt of which log
            probabilities are reported.
    """

    is_prefill: bool
    input_ids: torch.Tensor
    positions: torch.Tensor
    attn: AttentionMetadata
    last_tokens: torch.Tensor
    last_sequences: torch.Tensor
    next_positions: torch.Tensor
    sampling: SamplingRows | None
    choice: Choice
    controlled: tuple[ControlledRow, ...] = ()
    followed: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def control_state(self, vocab_size: int) -> ControlState | None:
        """State of the N rows with what those with controls say, made anew; None if no row has any."""
        if not self.controlled:
            return None
        state = ControlState.allocate(len(self.last_tokens), vocab_size, self.input_ids.device)
        state.write(self.controlled)
        return state

    def beside_rows(self, input_ids: torch.Tensor, positions: torch.Tensor, decode: DecodeMetadata) -> MixedMetadata:
        """Metadata of decode rows and prompt chunks, once the rows are filled in where the layout has left room.

        Args: what `row_inputs` gives.
        """
        prefill = self.attn_of_last(decode.workspace)
        if not isinstance(prefill, PrefillMetadata):
            raise EngineError("decode rows go beside prompt chunks, not beside other decode rows")
        num_rows = decode.num_rows
        self.input_ids[:num_rows].copy_(input_ids)
        self.positions[:num_rows].copy_(positions)
        prefill.slot_mapping[:num_rows].copy_(decode.slot_mapping)
        return MixedMetadata(decode, prefill)

    def attn_of_last(self, workspace: DecodeWorkspace) -> AttentionMetadata:
        """`attn` that also tells a model, if it is so, that it is only asked for the hidden states of `last_tokens`."""
        attn = self.attn
        if not isinstance(attn, PrefillMetadata) or self.followed:
            return attn
        last = LastTokensMetadata(
            slot_mapping=attn.slot_mapping,
            last_tokens=self.last_tokens,
            sequences=self.last_sequences,
            block_tables=attn.block_tables,
            # The last token of a prompt attends to all tokens before the one that is to be sampled.
            context_lens=self.next_positions,
            workspace=workspace,
        )
        return replace(attn, last=last)


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
    controls = sampling.controls
    if controls is not None:
        header[MIN_P] = float_bits(controls.min_p)
        header[REPETITION_PENALTY] = float_bits(controls.repetition_penalty)
        header[PRESENCE_PENALTY] = float_bits(controls.presence_penalty)
        header[FREQUENCY_PENALTY] = float_bits(controls.frequency_penalty)
        header[CONTROLS] = HAS_PENALTIES if controls.has_penalties else 0
        header[CONTROLS] |= HAS_MASK if controls.has_mask else 0
        header[NUM_BIASES] = len(controls.biases)
        header[NUM_BAD_WORDS] = len(controls.bad_words)
        header[NUM_LOGPROBS] = 1 + controls.num_logprobs
    return header


@dataclass(frozen=True)
class PrefillLayout:
    """Where the inputs of a prefill lie in one int32 buffer, which is all that is sent to the device.

    What the chunks at hand leave over is padding: tokens of id 0 that are stored nowhere, sequences without queries,
    tiles that start behind every query, and greedy rows of context length 0 whose token nobody reads.

    Attributes:
        num_tokens: T.
        num_seqs: B.
        table_width: blocks in a row of the block tables.
        num_tiles: programs of the attention kernel for each head.
        num_sampled: N, rows that get a next token.
        tile_rows: query rows of a tile.
        num_rows: decode rows before the chunks, which are part of T; the device fills in what they are.
    """

    num_tokens: int
    num_seqs: int
    table_width: int
    num_tiles: int
    num_sampled: int
    tile_rows: int
    num_rows: int = 0

    @classmethod
    def for_chunks(
        cls, chunks: list[PrefillChunk], block_size: int, tile_rows: int, num_rows: int = 0
    ) -> PrefillLayout:
        """The layout that these chunks fill exactly, but for the width of the tables, a multiple of 16."""
        # A query reads keys up to its own position only, so later blocks of a table are not needed.
        width = max(-(-chunk.context_len // block_size) for chunk in chunks)
        return cls(
            num_tokens=num_rows + sum(len(chunk.token_ids) for chunk in chunks),
            num_seqs=len(chunks),
            table_width=-(-width // 16) * 16,
            num_tiles=sum(-(-len(chunk.token_ids) // tile_rows) for chunk in chunks),
            num_sampled=sum(chunk.sample for chunk in chunks),
            tile_rows=tile_rows,
            num_rows=num_rows,
        )

    def holds(self, other: PrefillLayout) -> bool:
        """Whether chunks of the other layout fit here."""
        return (
            other.num_tokens <= self.num_tokens
            and other.num_seqs <= self.num_seqs
            and other.table_width <= self.table_width
            and other.num_tiles <= self.num_tiles
            and other.num_sampled <= self.num_sampled
        )

    @property
    def sections(self) -> list[slice]:
        """Where each section lies, in the order of `pack`."""
        tokens, seqs, sampled = self.num_tokens, self.num_seqs, self.num_sampled
        tables = seqs * self.table_width
        sizes = [tokens, tokens, tokens, tables, seqs + 1, seqs, 2 * self.num_tiles]
        sizes += [sampled, sampled, sampled, sampled * HEADER]
        starts = itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
        return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]

    def pack(self, chunks: list[PrefillChunk], block_size: int) -> np.ndarray:
        """The buffer's contents, int32, for chunks that fit."""
        sections = self.sections
        buffer = np.zeros(-(-sections[-1].stop // ALIGNMENT) * ALIGNMENT, dtype=np.int32)
        ids, positions, slots, tables, cu_seqlens, context_lens, tiles, *rows = (buffer[part] for part in sections)
        last_tokens, last_sequences, next_positions, headers = rows
        tables, headers = tables.reshape(self.num_seqs, -1), headers.reshape(self.num_sampled, HEADER)
        slots[:] = -1
        tiles = tiles.reshape(self.num_tiles, 2)
        tiles[:, 1] = _BEHIND_EVERY_QUERY
        sampled, start = 0, self.num_rows
        cu_seqlens[0] = start
        for index, chunk in enumerate(chunks):
            stop = start + len(chunk.token_ids)
            where = np.arange(chunk.start, chunk.context_len)
            table = np.array(chunk.block_table)
            ids[start:stop] = chunk.token_ids
            positions[start:stop] = where
            slots[start:stop] = table[where // block_size] * block_size + where % block_size
            tables[index, : len(table)] = table[: self.table_width]
            cu_seqlens[index + 1] = stop
            context_lens[index] = chunk.context_len
            if chunk.sample:
                last_tokens[sampled] = stop - 1
                last_sequences[sampled] = index
                next_positions[sampled] = chunk.context_len
                headers[sampled] = _header(-1, chunk.context_len, chunk.sampling)
                sampled += 1
            start = stop
        cu_seqlens[len(chunks) + 1 :] = start
        query_lens = [len(chunk.token_ids) for chunk in chunks]
        cut = prefill_tiles(query_lens, [chunk.context_len for chunk in chunks], self.tile_rows)
        if cut:
            tiles[: len(cut)] = cut
        return buffer

    def inputs(self, buffer: torch.Tensor, choice: Choice) -> StepInputs:
        """Views of a device buffer of this layout."""
        views = [buffer[section] for section in self.sections]
        attn = PrefillMetadata(
            slot_mapping=views[2],
            block_tables=views[3].view(self.num_seqs, self.table_width),
            cu_seqlens_q=views[4],
            context_lens=views[5],
            tiles=views[6].view(self.num_tiles, 2),
            tile_rows=self.tile_rows,
        )
        sampling = SamplingRows.of(views[10].view(self.num_sampled, HEADER)) if self.num_sampled else None
        return StepInputs(True, views[0], views[1], attn, views[7], views[8], views[9], sampling, choice)


def prefill_inputs(
    chunks: list[PrefillChunk], block_size: int, tile_rows: int, device: torch.device, num_rows: int = 0
) -> StepInputs:
    """Inputs of prompt chunks, at least one, in tiles of `tile_rows` query rows, behind room for decode rows."""
    layout = PrefillLayout.for_chunks(chunks, block_size, tile_rows, num_rows)
    inputs = layout.inputs(to_device(layout.pack(chunks, block_size), device), choice_of_chunks(chunks))
    controlled = tuple(
        ControlledRow(row, chunk.sampling.controls, chunk.seen, chunk.recent, chunk.mask)
        for row, chunk in enumerate(chunk for chunk in chunks if chunk.sample)
        if chunk.sampling.controls is not None
    )
    starts = itertools.accumulate((len(chunk.token_ids) for chunk in chunks), initial=num_rows)
    followed = ((start, chunk.next_token_ids) for start, chunk in zip(starts, chunks, strict=False))
    return replace(inputs, controlled=controlled, followed=tuple(entry for entry in followed if entry[1]))


def chunk_inputs(
    chunks: list[PrefillChunk], block_size: int, tiling: PrefillTiling, device: torch.device, num_rows: int = 0
) -> StepInputs:
    """Inputs of prompt chunks, at least one, in tiles that suit their lengths, behind room for decode rows."""
    tile_rows = tiling.rows([len(chunk.token_ids) for chunk in chunks])
    return prefill_inputs(chunks, block_size, tile_rows, device, num_rows)


def row_inputs(
    rows: torch.Tensor, num_rows: int, block_size: int, vocab_size: int, workspace: DecodeWorkspace
) -> tuple[torch.Tensor, torch.Tensor, DecodeMetadata]:
    """Ids and positions, int32 `[num_rows]`, and metadata of the first decode rows of the device."""
    input_ids, positions, slots, context_lens = load_rows(rows, num_rows, block_size, vocab_size)
    return input_ids, positions, DecodeMetadata(slots, rows[:num_rows, HEADER:], context_lens, workspace)


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
    choice = max(update.sampling.choice for update in updates)
    return StepInputs(False, ids, positions_, attn, last, last, context_lens_, SamplingRows.of(matrix), choice)
