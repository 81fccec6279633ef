"""The two ends of a decode step on the device: what goes in is read from the rows, what came out is written back.

Rows are described in `row_layout`. For a row with context length c > 0 the newest token sits at position c - 1:

    load:     id = TOKEN, position = c - 1, slot = table[position // block_size] * block_size + position % block_size
    advance:  TOKEN = the sampled token, CONTEXT_LEN = c + 1

A row with c = 0 is padding of a CUDA graph's bucket: id 0, position 0, slot -1, context 0, and it never advances. A
block id that is negative or lies past the table gives slot -1, so a step too many writes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dependent_launch import pdl_options, start_after_previous
from tritonllm.kernels.kv_store import check_per_token
from tritonllm.kernels.launch import Launch, cdiv, check, runs_kernel, shape_of, supports_pdl
from tritonllm.kernels.reference import elementwise
from tritonllm.kernels.row_layout import CONTEXT_LEN, HEADER, SEED, TEMPERATURE, TOKEN, TOP_K, TOP_P

__all__ = [
    "CONTEXT_LEN",
    "HEADER",
    "SEED",
    "TEMPERATURE",
    "TOKEN",
    "TOP_K",
    "TOP_P",
    "advance_rows",
    "load_rows",
    "plan_advance_rows",
    "plan_load_rows",
]

_BLOCK = 32  # rows of one program of one warp: the loads of a row are a chain, so more warps would only wait


@triton.jit(do_not_specialize=["num_rows"])
def _load_rows_kernel(
    rows_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    num_rows,
    row_stride,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    TOKEN: tl.constexpr,
    CONTEXT_LEN: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = row < num_rows
    row_ptrs = rows_ptr + row.to(tl.int64) * row_stride
    context_len = tl.load(row_ptrs + CONTEXT_LEN, mask=mask, other=0)
    token = tl.load(row_ptrs + TOKEN, mask=mask, other=0)

    live = context_len > 0
    position = tl.where(live, context_len - 1, 0)
    entry = position // BLOCK_SIZE
    block = tl.load(row_ptrs + HEADER + entry, mask=mask & live & (entry < MAX_BLOCKS), other=-1)
    slot = tl.where(block >= 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    input_id = tl.where(live & (token >= 0) & (token < VOCAB_SIZE), token, 0)

    tl.store(input_ids_ptr + row, input_id, mask=mask)
    tl.store(positions_ptr + row, position, mask=mask)
    tl.store(slot_mapping_ptr + row, slot, mask=mask)
    tl.store(context_lens_ptr + row, tl.where(live, context_len, 0), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _advance_rows_kernel(
    rows_ptr,
    tokens_ptr,
    sampled_ptr,
    num_rows,
    row_stride,
    TOKEN: tl.constexpr,
    CONTEXT_LEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = row < num_rows
    row_ptrs = rows_ptr + row.to(tl.int64) * row_stride
    context_len = tl.load(row_ptrs + CONTEXT_LEN, mask=mask, other=0)
    token = tl.load(tokens_ptr + row, mask=mask, other=0)
    live = context_len > 0
    tl.store(sampled_ptr + row, token, mask=mask)
    tl.store(row_ptrs + TOKEN, token, mask=live)
    tl.store(row_ptrs + CONTEXT_LEN, context_len + 1, mask=live)


def _check_rows(op: str, rows: torch.Tensor, num_rows: int) -> None:
    check(
        rows.dim() == 2 and rows.dtype == torch.int32 and rows.shape[1] > HEADER and rows.stride(1) == 1,
        op,
        lambda: f"rows must be int32[R, {HEADER} + max_blocks] with stride 1 along the last axis, not {shape_of(rows)}",
    )
    check(0 <= num_rows <= rows.shape[0], op, lambda: f"{num_rows} rows were asked of {shape_of(rows)}")


def plan_load_rows(
    rows: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    context_lens: torch.Tensor,
    block_size: int,
    vocab_size: int,
) -> Launch:
    """Plan of `load_rows` into four int32 [B] tensors."""
    num_rows = input_ids.shape[0]
    _check_rows("load_rows", rows, num_rows)
    outputs = {
        "input_ids": input_ids,
        "positions": positions,
        "slot_mapping": slot_mapping,
        "context_lens": context_lens,
    }
    for name, output in outputs.items():
        check_per_token("load_rows", name, output, num_rows)
    return Launch(
        kernel=_load_rows_kernel,
        grid=(cdiv(num_rows, _BLOCK),),
        args={
            "rows_ptr": rows,
            **{f"{name}_ptr": output for name, output in outputs.items()},
            "num_rows": num_rows,
            "row_stride": rows.stride(0),
        },
        constexprs={
            "MAX_BLOCKS": rows.shape[1] - HEADER,
            "BLOCK_SIZE": block_size,
            "VOCAB_SIZE": vocab_size,
            "TOKEN": TOKEN,
            "CONTEXT_LEN": CONTEXT_LEN,
            "HEADER": HEADER,
            "BLOCK": _BLOCK,
        },
        options={"num_warps": 1},
        makes_indices=True,  # the embedding's
    )


def plan_advance_rows(rows: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor) -> Launch:
    """Plan of `advance_rows`."""
    num_rows = tokens.shape[0] if tokens.dim() == 1 else -1
    _check_rows("advance_rows", rows, num_rows)
    check_per_token("advance_rows", "tokens", tokens, num_rows)
    check_per_token("advance_rows", "sampled", sampled, num_rows)
    return Launch(
        kernel=_advance_rows_kernel,
        grid=(cdiv(num_rows, _BLOCK),),
        args={
            "rows_ptr": rows,
            "tokens_ptr": tokens,
            "sampled_ptr": sampled,
            "num_rows": num_rows,
            "row_stride": rows.stride(0),
        },
        constexprs={"TOKEN": TOKEN, "CONTEXT_LEN": CONTEXT_LEN, "BLOCK": _BLOCK, "PDL": supports_pdl(rows.device)},
        options={"num_warps": 1, **pdl_options(rows.device)},
    )


def load_rows(
    rows: torch.Tensor, num_rows: int, block_size: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs of a decode step, from the first rows.

    Args:
        rows: int32 [R, HEADER + max_blocks].
        num_rows: B, how many rows the step runs.
        block_size: tokens of a cache block.
        vocab_size: a token outside [0, vocab_size) is read as 0 (the sampler writes -1 for a row that holds NaN).

    Returns:
        input_ids, positions, slot_mapping and context_lens, each int32 [B].

    Raises:
        KernelError: shapes or dtypes do not fit.
    """
    if not runs_kernel(rows):
        return elementwise.load_rows(rows, num_rows, block_size, vocab_size)
    # Four tensors, not slices of one: a slice's alignment would depend on B, and with it the compiled kernels behind.
    input_ids, positions, slot_mapping, context_lens = (
        torch.empty(num_rows, dtype=torch.int32, device=rows.device) for _ in range(4)
    )
    plan_load_rows(rows, input_ids, positions, slot_mapping, context_lens, block_size, vocab_size).run()
    return input_ids, positions, slot_mapping, context_lens


def advance_rows(rows: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor) -> None:
    """Append a sampled token to each of the first rows, in place; rows with context length 0 stay as they are.

    Args:
        rows: int32 [R, HEADER + max_blocks].
        tokens: int32 [B], contiguous.
        sampled: int32 [B], contiguous: takes all of them, for the host to read.

    Raises:
        KernelError: shapes or dtypes do not fit.
    """
    if not runs_kernel(rows):
        elementwise.advance_rows(rows, tokens, sampled)
        return
    plan_advance_rows(rows, tokens, sampled).run()
