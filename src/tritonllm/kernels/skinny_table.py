"""Which form of `skinny_linear` runs at which shape: what the GPU's tuning table says, and rules for all the rest.

The rules extend what was measured on one H200 to what compiles without spilling registers on every GPU family.
`python -m tritonllm.bench.linears --tune --write FILE` measures other forms against them and makes a table of winners.
"""

from __future__ import annotations

from functools import cache

from tritonllm.kernels.launch import check
from tritonllm.kernels.skinny_form import Form, gemv
from tritonllm.kernels.tuning_table import Tuning

_MANY_ROWS = 65536  # a vocabulary: so many programs that each should take more rows
_ONE_SHOT_COLUMNS = 2048  # longest rows of which a program can hold 16, and all of x, in registers
_ONE_SHOT_COLUMNS_FEW = 3072  # the same for at most 8 tokens without a norm
_ONE_SHOT_ELEMENTS = 24 << 20  # beyond, every program rereading x costs too much
_AMD_SHARED_MEMORY = 64 * 1024  # no NVIDIA GPU from Ampere on has so little
_GEMV_COLUMNS = 65536  # longest row that a program of eight warps can hold


def token_block(tokens: int, shared_memory: int) -> int:
    """Columns of a matrix product that hold the tokens. AMD's instructions take 16."""
    return 8 if tokens <= 8 and shared_memory > _AMD_SHARED_MEMORY else 16


def statistics_columns(block_m: int, num_warps: int, shared_memory: int) -> int:
    """Columns of x that a looped program squares at once; on AMD fewer, as registers hold all stages there."""
    elements = 4096 if shared_memory > _AMD_SHARED_MEMORY else 512 * num_warps
    return elements // block_m


@cache
def choose_form(
    tuning: Tuning,
    tokens: int,
    columns: int,
    rows: int,
    itemsize: int,
    gated: bool,
    normed: bool,
    shared_memory: int,
) -> Form:
    """The form for x [tokens, columns] and a weight of `rows` rows.

    Args:
        tuning: the table of the GPU, measured with 16-bit weights and asked for these only; `UNTUNED` for the rules.
        tokens: 1 to 16.
        columns, rows: shape of the weight; a gated weight counts gate and up rows.
        itemsize: bytes of an element.
        gated, normed: what is fused.
        shared_memory: bytes that a program may use.

    Raises:
        KernelError: the table has a form that this GPU cannot run.
    """
    block_m = token_block(tokens, shared_memory)
    tuned = tuning.form(tokens, columns, rows, gated, normed) if itemsize == 2 else None
    if tuned is not None:
        check(
            tuned.fits(block_m, gated, itemsize, shared_memory),
            "skinny_linear",
            lambda: (
                f"the tuning table has {tuned} for {tokens} tokens, {columns} columns and {rows} rows (gated={gated}, "
                f"normed={normed}), which does not fit the {shared_memory} bytes of shared memory here: "
                "tune on this GPU, without TRITONLLM_TUNING (python -m tritonllm.bench.linears --tune --write FILE)"
            ),
        )
        return tuned
    if tokens == 1 and columns <= _GEMV_COLUMNS * 2 // itemsize:
        return _gemv_form(columns, rows, itemsize, gated, normed)
    if itemsize == 4:
        # Exact products run on plain cores, whose operands fill the registers: more rows take more threads.
        return Form("looped", block_n=32, block_k=32, num_warps=4 if tokens <= 8 else 8, num_stages=2)
    longest = _ONE_SHOT_COLUMNS_FEW if block_m == 8 and not normed else _ONE_SHOT_COLUMNS
    if columns <= longest and rows * columns <= _ONE_SHOT_ELEMENTS:
        form = _one_shot_form(columns, gated, block_m)
        if form.fits(block_m, gated, itemsize, shared_memory):
            return form
    return _looped_form(columns, rows, gated, normed, block_m, shared_memory)


def _gemv_form(columns: int, rows: int, itemsize: int, gated: bool, normed: bool) -> Form:
    columns *= itemsize // 2  # registers are what counts
    if columns > 1024 and normed:  # warps share rows: else each would hold all of x and of the norm's weight
        return gemv(1024, 2 if gated else 4, 4) if columns <= 4096 else gemv(4096, 1, 8)
    if columns > 4096:
        return gemv(4096, 1, 8)
    if rows >= _MANY_ROWS and columns <= 2048:
        return gemv(256, 8, 4)
    return gemv(256, 4, 2 if columns <= 2048 and not gated else 4)


def _one_shot_form(columns: int, gated: bool, block_m: int) -> Form:
    """16 rows of the weight a program, in 64 registers of each thread or 128 for the longest rows; and all of x."""
    num_warps = 4 if columns <= 1024 and block_m == 8 else 8
    step = max(32 * num_warps, 1 << (columns - 1).bit_length())
    return Form("one_shot", 8 if gated else 16, step // num_warps, num_warps, split=num_warps)


def _looped_form(columns: int, rows: int, gated: bool, normed: bool, block_m: int, shared_memory: int) -> Form:
    """As many stages as shared memory takes, and shorter steps where they would be fewer than three."""
    if rows >= 16384:
        tile_rows, block_k, num_warps, split, num_stages = 64, 128, 4, 1, 4
    elif columns > 4096 or rows <= 2048:
        tile_rows, block_k, num_warps, split, num_stages = 16, 64, 4, 4, 5
    else:
        tile_rows, block_k, num_warps, split, num_stages = 32, 128, 4 if normed else 2, 1, 5
    column_bytes = 2 * split * (tile_rows + block_m)
    while block_k > 32 and 3 * block_k * column_bytes > shared_memory:
        block_k //= 2
    num_stages = max(2, min(num_stages, shared_memory // (block_k * column_bytes)))
    return Form("looped", tile_rows // (2 if gated else 1), block_k, num_warps, split=split, num_stages=num_stages)
