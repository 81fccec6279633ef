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
_DIRECT_COLUMNS = {8: 12288, 16: 8192}  # longest rows that the direct form was measured with, by block of tokens
_DIRECT_COLUMNS_NORMED = {8: 4096, 16: 2048}  # longer ones spill registers: a norm needs all of x first
_DIRECT_COLUMNS_AMD = 1024  # longer rows take several steps, which spill registers there
_DIRECT_ELEMENTS = 24 << 20  # beyond, programs of fewer rows were faster, and looped ones from 9 tokens on
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
    if _goes_direct(columns, rows, normed, block_m, shared_memory):
        return _direct_form(columns, rows, gated, normed, block_m, shared_memory)
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


def _goes_direct(columns: int, rows: int, normed: bool, block_m: int, shared_memory: int) -> bool:
    if shared_memory <= _AMD_SHARED_MEMORY:
        longest = _DIRECT_COLUMNS_AMD
    else:
        longest = (_DIRECT_COLUMNS_NORMED if normed else _DIRECT_COLUMNS)[block_m]
    return columns <= longest and rows < _MANY_ROWS and (block_m == 8 or rows * columns <= _DIRECT_ELEMENTS)


def _direct_form(columns: int, rows: int, gated: bool, normed: bool, block_m: int, shared_memory: int) -> Form:
    """A row of up to 1024 columns in one step, longer ones in as many in flight as registers hold."""
    step = 1024
    if columns <= 1024:
        step = max(256, 1 << (columns - 1).bit_length())
        tile_rows, num_warps, stages = 32, 4 if normed and block_m == 8 else max(4, step // 128), 1
    elif normed and columns > 2048:
        tile_rows, num_warps, stages = 32, 8, 1
    elif block_m == 8 and columns > 4096 and columns % 2048 == 0:
        tile_rows, step, num_warps, stages = 16, 2048, 16, 2
    elif block_m == 8 and rows * columns > _DIRECT_ELEMENTS:
        tile_rows, step, num_warps, stages = 16, 512, 4, 2
    elif columns % 512 != 0:  # masks take registers too
        tile_rows, num_warps, stages = 16, 8, 2
    elif columns % 1024 != 0:
        tile_rows, step, num_warps, stages = 32, 512, 8, 3
    elif 2048 < columns <= 3072 or (block_m == 8 and columns > 2048):
        tile_rows, num_warps, stages = 32, 16, 3
    else:
        tile_rows, num_warps, stages = 32, 8, 2
    if normed and block_m == 16 and (columns > 1024 or shared_memory <= _AMD_SHARED_MEMORY):
        tile_rows = 16  # so do the norm's weight and more tokens
    block_n, block_k = tile_rows // (2 if gated else 1), step // num_warps
    return Form("direct", block_n, block_k, num_warps, split=num_warps, num_stages=stages)


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
