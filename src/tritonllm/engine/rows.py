"""Which decode row of the device holds which sequence. Plain Python."""

from __future__ import annotations

from typing import NamedTuple

from tritonllm.engine.plan import RowUpdate, row_update
from tritonllm.engine.sequence import Sequence


class PlacedRows(NamedTuple):
    """The decode rows of one step.

    Attributes:
        sequences: in the order of their rows, from row 0 on.
        updates: rows to write whole.
        cleared: rows that become padding.
        grown: `(row, index in its table, block)` of rows that stay and got a block.
    """

    sequences: list[Sequence]
    updates: list[RowUpdate]
    cleared: list[int]
    grown: list[tuple[int, int, int]]


class RowPlacement:
    """Keeps sequences in the rows they have, so that a step changes few rows."""

    def __init__(self) -> None:
        self._rows: list[Sequence] = []

    def place(self, decoding: list[Sequence], new_blocks: dict[int, list[int]]) -> PlacedRows:
        """Map sequences to rows `0 .. n - 1`, writing only rows whose sequence changed.

        Args:
            decoding: the sequences of the step.
            new_blocks: by sequence id, what was just added to its block table.
        """
        count = len(decoding)
        wanted = {seq.seq_id for seq in decoding}
        rows: list[Sequence | None] = [seq if seq.seq_id in wanted else None for seq in self._rows[:count]]
        rows += [None] * (count - len(rows))
        placed = {seq.seq_id for seq in rows if seq is not None}
        for seq in self._rows:
            if seq.seq_id not in placed:
                seq.row = -1
        holes = [row for row, seq in enumerate(rows) if seq is None]
        updates = []
        for row, seq in zip(holes, (seq for seq in decoding if seq.seq_id not in placed), strict=True):
            updates.append(row_update(seq, row))
            rows[row] = seq
            seq.row = row
        cleared = list(range(count, len(self._rows)))
        self._rows = [seq for seq in rows if seq is not None]
        grown = [
            (seq.row, len(seq.block_table) - len(added) + offset, block_id)
            for seq in (self._rows if new_blocks else ())
            if seq.seq_id in placed
            for added in [new_blocks.get(seq.seq_id, [])]
            for offset, block_id in enumerate(added)
        ]
        return PlacedRows(list(self._rows), updates, cleared, grown)
