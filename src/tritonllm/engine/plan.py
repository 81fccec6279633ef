"""What one step does, as plain integers: the only thing that passes from the scheduler to the runners.

A plan has two segments from the first day: changes to the decode rows, which live on the device, and prefill chunks.
Either may be empty. Nothing below the runner knows a `Sequence`, nothing above it touches a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tritonllm.engine.controls import Seen
from tritonllm.engine.sequence import Choice, RowSampling, Sequence


class RowUpdate(NamedTuple):
    """Everything a decode row holds, for a row that is new, moved, or back.

    Attributes:
        row: row that is written.
        token: last token, if the host has read it.
        token_source: else the place among the previous step's sampled tokens, -1 if `token` counts.
        context_len: keys of the row once this step's token is stored.
        block_table: its blocks.
        sampling: how its next token is chosen.
        seen: the tokens before its last, if penalties have to know them.
        recent: the newest of them as a ring, if bad words have to know them.
    """

    row: int
    token: int
    token_source: int
    context_len: int
    block_table: list[int]
    sampling: RowSampling
    seen: Seen | None = None
    recent: tuple[int, ...] | None = None


class PrefillChunk(NamedTuple):
    """Consecutive tokens of one prompt.

    Attributes:
        token_ids: the tokens of the chunk, at least one.
        start: position of the first, which is the number of keys already stored.
        block_table: blocks of the whole sequence.
        sample: True for the last chunk of a prompt, whose last position yields a token.
        sampling: how that token is chosen.
        seen: the tokens before it, if penalties have to know them.
        next_token_ids: the tokens of the prompt that follow the first, second, ... of the chunk, if their log
            probabilities are wanted.
        recent: the newest tokens before that one as a ring, if bad words have to know them.
        mask: int32 words of the tokens that the grammar of a sequence allows next, if the chunk samples one of its.
    """

    token_ids: list[int]
    start: int
    block_table: list[int]
    sample: bool
    sampling: RowSampling
    seen: Seen | None = None
    next_token_ids: tuple[int, ...] = ()
    recent: tuple[int, ...] | None = None
    mask: bytes | None = None

    @property
    def context_len(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class StepPlan:
    """One step of the engine.

    Attributes:
        num_decode_rows: rows `0 .. n - 1` decode one token each.
        row_updates: rows to write before that.
        cleared_rows: rows that become padding.
        new_blocks: `(row, index in its table, block)` of rows that grew.
        choice: what choosing the tokens of the decode rows takes.
        chunks: prompt chunks.
        zero_blocks: blocks to zero first.
        waits_for_masks: a decode row has a grammar, which has to know the token before: what the decode rows choose
            waits for `choose` with the masks of such rows.
    """

    num_decode_rows: int = 0
    row_updates: list[RowUpdate] = field(default_factory=list)
    cleared_rows: list[int] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    choice: Choice = Choice.PLAIN
    chunks: list[PrefillChunk] = field(default_factory=list)
    zero_blocks: list[int] = field(default_factory=list)
    waits_for_masks: bool = False

    @property
    def is_unchanged(self) -> bool:
        """Whether this step decodes the rows as they stand, and nothing else."""
        return not (self.row_updates or self.cleared_rows or self.new_blocks or self.chunks or self.zero_blocks)

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return self.num_decode_rows + sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def reports(self) -> bool:
        """Whether log probabilities of tokens that this step chooses are read."""
        return max(self.choice, choice_of_chunks(self.chunks)) is Choice.REPORTED

    @property
    def reports_prompts(self) -> bool:
        """Whether log probabilities of tokens of prompts are read."""
        return any(chunk.next_token_ids for chunk in self.chunks)


def choice_of_chunks(chunks: list[PrefillChunk]) -> Choice:
    """What choosing the tokens that these chunks sample takes."""
    return max((chunk.sampling.choice for chunk in chunks if chunk.sample), default=Choice.PLAIN)


def row_update(seq: Sequence, row: int) -> RowUpdate:
    """The whole row of a sequence whose newest token is about to be stored."""
    unread = seq.num_unread_tokens > 0
    return RowUpdate(
        row=row,
        token=-1 if unread else seq.token_ids[-1],
        token_source=seq.token_source if unread else -1,
        context_len=seq.length,
        block_table=list(seq.block_table),
        sampling=seq.sampling,
        seen=seq.seen(seq.length - 1),
        recent=seq.recent(seq.length - 1),
    )


def prefill_chunk(seq: Sequence, num_tokens: int) -> PrefillChunk:
    """The next `num_tokens` tokens of a sequence that are not computed yet."""
    start = seq.num_computed_tokens
    stop = start + num_tokens
    return PrefillChunk(
        token_ids=seq.token_ids[start:stop],
        start=start,
        block_table=list(seq.block_table),
        sample=stop == len(seq),
        sampling=seq.sampling,
        seen=seq.seen(stop) if stop == len(seq) else None,
        next_token_ids=seq.next_prompt_tokens(start, stop),
        recent=seq.recent(stop) if stop == len(seq) else None,
        mask=seq.matcher.mask() if seq.matcher is not None and stop == len(seq) else None,
    )


def plan_of(seqs: list[Sequence], is_prefill: bool, num_rows: int) -> StepPlan:
    """A plan for sequences that somebody else scheduled: whole prompts, or one decode step that fills every row anew.

    Args:
        seqs: sequences with block tables; for a decode step each with a slot for its last token.
        is_prefill: which of the two.
        num_rows: rows of the decode state; those not used become padding.
    """
    if is_prefill:
        return StepPlan(chunks=[prefill_chunk(seq, len(seq) - seq.num_computed_tokens) for seq in seqs])
    updates = [row_update(seq, row) for row, seq in enumerate(seqs)]
    return StepPlan(
        num_decode_rows=len(seqs),
        row_updates=updates,
        cleared_rows=list(range(len(seqs), num_rows)),
        choice=max((seq.sampling.choice for seq in seqs), default=Choice.PLAIN),
        waits_for_masks=any(seq.matcher is not None for seq in seqs),
    )


def masks_of(decoded: Iterable[Sequence]) -> list[tuple[int, bytes]]:
    """What such a step waits for, once every token before it was read: rows with their masks.

    Args:
        decoded: the sequences of the step in the order of their rows. Those that have finished since need no mask.
    """
    return [
        (row, seq.matcher.mask()) for row, seq in enumerate(decoded) if seq.matcher is not None and not seq.is_finished
    ]
