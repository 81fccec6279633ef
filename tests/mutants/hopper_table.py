"""Faults of the kernels written in Gluon, which has no interpreter: they are found on a Hopper GPU alone."""

from __future__ import annotations

from mutant import Mutant

# One compilation or a few each, so that all mutants together take little longer than one.
_TILES = "test_prefill_hopper.py::test_many_more_tiles_than_programs"
_EDGES = "test_prefill_hopper.py::test_edges_of_blocks_and_tiles"
_UNSEEN = "test_prefill_hopper.py::test_a_key_behind_a_query_is_not_seen_even_if_it_is_nan"
_PEAKS = "test_prefill_hopper.py::test_peaks_that_rise_from_block_to_block"
_SHORT_TILES = "test_prefill_hopper.py::test_tiles_of_one_block_come_right_behind_each_other"
_PREFILL_PLACES = "test_prefill_hopper.py::test_nothing_beside_the_output_is_written"
_PREFILL_FAR = "test_prefill_hopper.py::test_rows_may_be_far_apart"
_LONG_SUMS = "test_hopper_linear.py::test_sums_longer_than_what_is_in_flight"
_LINEAR_PLACES = "test_hopper_linear.py::test_nothing_beside_the_output_is_written"
_LINEAR_FAR = "test_hopper_linear.py::test_rows_may_be_far_apart"
_CHAIN = "test_hopper_linear.py::test_a_chain_of_them_equals_one_at_a_time"


def _hopper(name: str, module: str, old: str, new: str, *tests: str) -> Mutant:
    names = tuple(f"tests/kernels/{test}" for test in tests)
    return Mutant(name, f"tritonllm.kernels.{module}", old, new, names, on_hopper=True)


HOPPER_MUTANTS = (
    _hopper(
        "Hopper: queries do not see themselves",
        "prefill_hopper_kernel",
        "times the scale.\n            visible = gl.expand_dims(first_key + columns, 0) <= ",
        "times the scale.\n            visible = gl.expand_dims(first_key + columns, 0) < ",
        _TILES,
    ),
    _hopper(
        "Hopper: the second block of the diagonal has no mask",
        "prefill_hopper_kernel",
        "if first_key + BLOCK_N - 1 > first_position:",
        "if first_key > first_position:",
        _EDGES,
    ),
    _hopper(
        "Hopper: a block has no mask if its last key alone is hidden",
        "prefill_hopper_kernel",
        "if first_key + BLOCK_N - 1 > first_position:",
        "if first_key + BLOCK_N - 2 > first_position:",
        _UNSEEN,
    ),
    _hopper(
        "Hopper: a turn that is dealt backwards begins one program too far, so one tile is done twice and one never",
        "prefill_hopper_kernel",
        "programs - 1 - program)",
        "programs - program)",
        _EDGES,
    ),
    _hopper(
        "Hopper: consumers stay a tile behind",
        "prefill_hopper_kernel",
        "_tile_at(turn + 1, num_items",
        "_tile_at(turn, num_items",
        _EDGES,
    ),
    _hopper(
        "Hopper: queries are overwritten before they were read",
        "prefill_hopper_kernel",
        "mbarrier.wait(q_empty.index(place), ((taken // 2) & 1) ^ 1)",
        "pass",
        _SHORT_TILES,
    ),
    _hopper(
        "Hopper: keys and values that share a barrier are overwritten before they were read",
        "prefill_hopper_kernel",
        "else:\n                    mbarrier.wait(v_empty.index(stage), phase)",
        "else:\n                    pass",
        _PEAKS,
        _EDGES,
    ),
    _hopper(
        "Hopper: values behind a context are not cleared",
        "prefill_hopper_kernel",
        "if first_key + BLOCK_N > context_len:",
        "if first_key > context_len:",
        _TILES,
    ),
    _hopper(
        "Hopper: the last block of keys is left out",
        "prefill_hopper_kernel",
        "(end + BLOCK_N - 1) // BLOCK_N, 0)",
        "end // BLOCK_N, 0)",
        _TILES,
    ),
    _hopper(
        "Hopper: a cache block has the rows of a tile",
        "prefill_hopper_kernel",
        "// BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE",
        "// BLOCK_SIZE) * BLOCK_N + start % BLOCK_SIZE",
        _TILES,
    ),
    _hopper(
        "Hopper: a query head reads the wrong KV head",
        "prefill_hopper_kernel",
        "column = head // GROUP * HEAD_DIM",
        "column = head % GROUP * HEAD_DIM",
        _TILES,
    ),
    _hopper(
        "Hopper: the running sum does not decay",
        "prefill_hopper_kernel",
        "acc = acc * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, SUMS)), 1)",
        "pass",
        _TILES,
    ),
    _hopper(
        "Hopper: the row sums do not decay",
        "prefill_hopper_kernel",
        "total = total * gl.expand_dims(gl.convert_layout(decay, QUARTERS), 1)",
        "pass",
        _TILES,
    ),
    _hopper(
        "Hopper: the last block of a tile waits for keys that come only after it",
        "prefill_hopper_kernel",
        "pred=i + 1 < num_blocks",
        "pred=True",
        _TILES,
    ),
    _hopper(
        "Hopper: a prefix does not move the queries",
        "prefill_hopper_kernel",
        "first_position = context_len - query_len + row",
        "first_position = row",
        _TILES,
    ),
    _hopper(
        "Hopper: both warpgroups take the first rows of a tile",
        "prefill_hopper_kernel",
        "[token + 64, head * HEAD_DIM]",
        "[token, head * HEAD_DIM]",
        _TILES,
    ),
    _hopper(
        "Hopper: keys are used before they have come",
        "prefill_hopper_kernel",
        "mbarrier.wait(k_full.index(stage), phase)\n            scores",
        "scores",
        _TILES,
    ),
    _hopper(
        "Hopper: a tile writes the row behind its sequence",
        "prefill_hopper_kernel",
        "mask=gl.expand_dims(rows < query_len, 1)",
        "mask=gl.expand_dims(rows <= query_len, 1)",
        _PREFILL_PLACES,
    ),
    _hopper(
        "Hopper: the address of an attention output has 32 bits",
        "prefill_hopper_kernel",
        "(query_start + rows).to(gl.int64) * out_token_stride",
        "(query_start + rows) * out_token_stride",
        _PREFILL_FAR,
    ),
    _hopper(
        "Hopper: the last step of a sum is left out",
        "hopper_linear_kernel",
        "(K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)",
        "K // (SPLITS * BLOCK_K)",
        _LONG_SUMS,
    ),
    _hopper(
        "Hopper: a linear layer's step is used before it has come",
        "hopper_linear_kernel",
        "mbarrier.wait(ready.index(stage), (step // STAGES) & 1)",
        "pass",
        _LONG_SUMS,
    ),
    _hopper(
        "Hopper: each part of a sum begins a step behind the one before",
        "hopper_linear_kernel",
        "split * (STEPS * BLOCK_K)",
        "split * BLOCK_K",
        _LONG_SUMS,
    ),
    _hopper(
        "Hopper: every part has the bias",
        "hopper_linear_kernel",
        "mask=(row < N) & (split == 0)",
        "mask=row < N",
        _LONG_SUMS,
    ),
    _hopper(
        "Hopper: the rows of up begin one too late",
        "hopper_linear_kernel",
        "[up_row, column]",
        "[up_row + 1, column]",
        _LONG_SUMS,
    ),
    _hopper(
        "Hopper: every part of a sum multiplies the first columns of x",
        "hopper_linear_kernel",
        "column = first_column + step * BLOCK_K\n    load_async(x_desc",
        "column = step * BLOCK_K\n    load_async(x_desc",
        _LONG_SUMS,
    ),
    _hopper(
        "Hopper: the last tile of tokens is moved back one too far",
        "hopper_linear_kernel",
        "num_tokens - BLOCK_M)",
        "num_tokens - BLOCK_M - 1)",
        _LINEAR_PLACES,
    ),
    _hopper(
        "Hopper: tokens of a second box count on from the first",
        "hopper_linear_kernel",
        "second_token - BOX_M + place",
        "first_token + place",
        _LINEAR_PLACES,
    ),
    _hopper(
        "Hopper: a token too many is written",
        "hopper_linear_kernel",
        "token < num_tokens",
        "token <= num_tokens",
        _LINEAR_PLACES,
    ),
    _hopper(
        "Hopper: an output behind the last is written",
        "hopper_linear_kernel",
        "gl.expand_dims(row < N, 0)",
        "gl.expand_dims(row <= N, 0)",
        _LINEAR_PLACES,
    ),
    _hopper(
        "Hopper: the address of a linear layer's output has 32 bits",
        "hopper_linear_kernel",
        "token.to(gl.int64) * out_stride",
        "token * out_stride",
        _LINEAR_FAR,
    ),
    _hopper(
        "Hopper: x is read before the kernel that computes it has ended",
        "hopper_linear_kernel",
        "if PDL:\n        wait_for_previous()",
        "if False:\n        wait_for_previous()",
        _CHAIN,
    ),
)
