"""The order in which attention takes the sequences of a decode batch: the longest first.

    order[r] = the sequence that r others come before: longer ones, and of equal ones those of a lower index

Programs start in the order of the grid. When those of a large batch come as they are, an SM may begin a long sequence
as the others run out of work; with the longest first (LPT scheduling: Graham, "Bounds on Multiprocessing Timing
Anomalies", 1969) the last ones are short. The order changes when a program runs and nothing that it computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonllm.kernels.launch import Launch, cdiv, check, runs_kernel, shape_of
from tritonllm.kernels.reference import elementwise

FEW_ROWS = 16
"""Batches up to this size need no order: the programs of their attention run all at once, or nearly."""

_ROWS = 16  # that a program ranks
_OTHERS = 256  # that it compares them with at a time


@triton.jit(do_not_specialize=["num_rows"])
def _longest_first_kernel(context_lens_ptr, order_ptr, num_rows, ROWS: tl.constexpr, OTHERS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    length = tl.load(context_lens_ptr + row, mask=row < num_rows, other=0)[:, None]
    rank = tl.zeros([ROWS], tl.int32)
    for start in tl.range(0, num_rows, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_length = tl.load(context_lens_ptr + other, mask=other < num_rows, other=-1)[None, :]
        ahead = (other_length > length) | ((other_length == length) & (other[None, :] < row[:, None]))
        rank += tl.sum(ahead.to(tl.int32), axis=1)
    tl.store(order_ptr + rank, row, mask=row < num_rows)


def check_order(op: str, order: torch.Tensor | None, batch: int) -> None:
    """Raise `KernelError` unless an order, where there is one, is contiguous int32 [B]."""
    check(
        order is None or (order.dtype == torch.int32 and order.shape == (batch,) and order.is_contiguous()),
        op,
        lambda: f"order must be contiguous int32 [{batch}] or None, not {shape_of(order)}",  # type: ignore[arg-type]
    )


def plan_longest_first(context_lens: torch.Tensor, order: torch.Tensor) -> Launch:
    """Plan of `longest_first` into order int32 [B]."""
    check(
        context_lens.dim() == 1 and context_lens.dtype == torch.int32 and context_lens.is_contiguous(),
        "longest_first",
        lambda: f"context_lens must be contiguous int32 [B], not {shape_of(context_lens)}",
    )
    num_rows = context_lens.shape[0]
    check_order("longest_first", order, num_rows)
    return Launch(
        kernel=_longest_first_kernel,
        grid=(cdiv(num_rows, _ROWS),),
        args={"context_lens_ptr": context_lens, "order_ptr": order, "num_rows": num_rows},
        constexprs={"ROWS": _ROWS, "OTHERS": _OTHERS},
        options={"num_warps": 4},
    )


def longest_first(context_lens: torch.Tensor) -> torch.Tensor:
    """Indices of a batch's sequences by falling context length, equal ones in their order.

    Args:
        context_lens: int32 [B], contiguous, none negative.

    Returns:
        int32 [B], new: a permutation of 0 .. B - 1.

    Raises:
        KernelError: shape or dtype do not fit.
    """
    if not runs_kernel(context_lens):
        return elementwise.longest_first(context_lens)
    order = torch.empty_like(context_lens)
    plan_longest_first(context_lens, order).run()
    return order
