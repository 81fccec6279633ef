"""A batch that only decodes: the same sequences in the same rows, step after step, until one ends or another arrives.

Most steps of a large batch are of this kind. The scheduler then asks here, where a step costs as much as changes in it:
the sequences that need a block now are known beforehand, and nobody else is looked at.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from tritonllm.engine.block_manager import BlockManager
from tritonllm.engine.in_flight import InFlight
from tritonllm.engine.plan import StepPlan
from tritonllm.engine.sequence import Choice, Sequence


class SteadyBatch:
    """The steps that follow a decode step as long as nobody comes or goes; whoever changes that drops this object.

    Args:
        decoded: sequences of that step, by row.
        choice: what choosing their tokens takes.
        block_size: tokens a block holds.

    Attributes:
        in_flight: what each of these steps leaves to read.
    """

    def __init__(self, decoded: list[Sequence], choice: Choice, block_size: int) -> None:
        self.in_flight = InFlight(decoded, [])
        self._block_size = block_size
        self._unchanged = StepPlan(len(decoded), choice=choice, waits_for_masks=bool(self.in_flight.with_grammar))
        self._step = 0
        self._due = [(self._free_steps(seq), seq.row, seq) for seq in decoded]
        heapq.heapify(self._due)

    def next_step(self, manager: BlockManager) -> StepPlan | None:
        """The next step, with the blocks that it needs; None if a sequence has to end first or finds no block."""
        due = []
        while self._due[0][0] <= self._step:
            due.append(heapq.heappop(self._due)[2])
            if not self._due:
                break
        if any(seq.length >= seq.max_length for seq in due) or len(due) > manager.num_free_blocks:
            return None
        plan = self._unchanged
        if due:
            new_blocks = [
                (seq.row, len(seq.block_table) - 1, block_id) for seq in due for block_id in manager.append(seq)
            ]
            plan = replace(plan, new_blocks=new_blocks)
            for seq in due:
                heapq.heappush(self._due, (self._step + self._free_steps(seq), seq.row, seq))
        self._step += 1
        for seq in self.in_flight.decoded:
            seq.num_computed_tokens += 1
            seq.num_unread_tokens += 1
            seq.num_steps_in_flight += 1
        return plan

    def _free_steps(self, seq: Sequence) -> int:
        """Steps that a sequence goes on without a new block and without reaching its end."""
        return min(seq.max_length, len(seq.block_table) * self._block_size + 1) - seq.length
