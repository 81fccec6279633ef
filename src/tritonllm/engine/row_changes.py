"""The decode rows of the device brought up to date; work grows with the changes, not with the batch."""

from __future__ import annotations

import torch

from tritonllm.engine.control_state import ControlledRow, ControlState
from tritonllm.engine.inputs import pack_row
from tritonllm.engine.plan import StepPlan
from tritonllm.engine.upload import upload
from tritonllm.kernels.decode_rows import CONTEXT_LEN, HEADER, TOKEN


def apply_row_changes(plan: StepPlan, rows: torch.Tensor, sampled: torch.Tensor, controls: ControlState) -> None:
    """Write the rows that a step changes, in one upload; rows with controls take a second one.

    Args:
        plan: says which.
        rows: int32 `[max_num_rows, width]`, the decode rows.
        sampled: int32, the tokens of the step before, where a row may take its own from.
        controls: what the rows say about tokens.
    """
    width = rows.shape[1]
    cells = [(row * width + CONTEXT_LEN, 0) for row in plan.cleared_rows]
    cells += [(row * width + HEADER + index, block_id) for row, index, block_id in plan.new_blocks]
    updates = plan.row_updates
    if not cells and not updates:
        return
    used = HEADER + max((len(update.block_table) for update in updates), default=0)
    packed = [value for update in updates for value in pack_row(update, used)]
    where, what, changed, sources, matrix = upload(
        [
            [cell for cell, _ in cells],
            [value for _, value in cells],
            [update.row for update in updates],
            [update.token_source for update in updates],
            packed,
        ],
        rows.device,
    )
    if cells:
        rows.view(-1).index_copy_(0, where.long(), what)
    if updates:
        matrix = matrix.view(len(updates), used)
        on_device = sampled[sources.clamp(min=0).long()]
        matrix[:, TOKEN] = torch.where(sources >= 0, on_device, matrix[:, TOKEN])
        rows[:, :used].index_copy_(0, changed.long(), matrix)
        controlled = [
            ControlledRow(update.row, update.sampling.controls, update.seen, update.recent)
            for update in updates
            if update.sampling.controls is not None
        ]
        if controlled:
            controls.write(controlled)
