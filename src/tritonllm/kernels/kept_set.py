"""The tokens that top-k, top-p and min-p keep, as one threshold a row: the smallest kept logit, or a bound below it.

    top-k: a token stays if fewer than k logits are larger than its own;
    min-p: a token stays if its probability is at least min-p times the largest one;
    top-p: a token stays if the mass of larger logits is less than p times the mass that top-k and min-p left.

So equal logits stay or go together, and the largest always stays. Mass is exp((x - max) / temperature) in fixed point
with 40 bits: sums of integers do not depend on their order, so neither does the result.

The search narrows a bracket until a short list can hold its tokens, in passes that each read the row at most once:
    extremes   largest and smallest logit of each tile;
    coarse     the mass of all tokens, exact, and what lies above a few edges, roughly;
    fine       the same for edges between two of these, where more tokens than the list takes may lie there;
    collect    tokens between two edges go on the list, and the mass above, exact, into a sum;
    choice     the exact answer, from the list if the exact sums show that it holds it, else from the whole row.
What is rough decides only how long the last pass takes. A pass skips tiles whose maximum is below all that is still in
question. The passes are always the same, so a CUDA graph can hold them.

Who wants a token and not a threshold has it from the same passes: tokens above the bracket are kept whatever the
threshold is, so `collect` draws from them while it has them, and `choice` from the list.
"""

from __future__ import annotations

from typing import Any

import torch

from tritonllm.kernels.dependent_launch import pdl_options
from tritonllm.kernels.kept_set_choice import _choice_kernel
from tritonllm.kernels.kept_set_collect import _collect_kernel
from tritonllm.kernels.kept_set_passes import BOUNDS, SUMS, _coarse_kernel, _extremes_kernel, _fine_kernel
from tritonllm.kernels.launch import Launch, cdiv, check, gpu_of, runs_kernel, supports_pdl
from tritonllm.kernels.logits import check_column, check_logits, tiling
from tritonllm.kernels.noise import has_hardware_log
from tritonllm.kernels.reference import sampling as reference

KEPT_TILE = 1024
"""Tokens that a pass skips together."""
CAPACITY = 8192
"""Tokens that the list of a row takes."""
_FEW = 128
"""Tokens of a list that are compared each with each."""
_WARPS = 4
_PROGRAMS_PER_MULTIPROCESSOR = 16
_CHOICE_WARPS = 16


def _span(tiles: int, batch: int, device: torch.device) -> int:
    """Tiles of a program: one where the batch is small, so that all multiprocessors have some."""
    programs = _PROGRAMS_PER_MULTIPROCESSOR * gpu_of(device).num_sms
    return max(1, min(tiles, tiles * batch // programs))


def _filters(
    op: str, logits: torch.Tensor, columns: dict[str, torch.Tensor | None]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments of what decides about kept tokens, and strides of rows."""
    strides = {"logits_stride": logits.stride(0)}
    for name, column in columns.items():
        if column is not None:
            check_column(op, name, column, torch.int32 if name == "top_ks" else torch.float32, logits.shape[:1])
        strides[f"{name}_stride"] = 0 if column is None else column.stride(0)
    return {f"{name}_ptr": column for name, column in columns.items()}, strides


def _draw(
    op: str, draws_by: tuple[torch.Tensor, torch.Tensor] | None, batch: int, capacity: int, parts: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments of a draw with scratch for its candidates, and strides; without seeds and positions there is none."""
    if draws_by is None:
        pointers = dict.fromkeys(("ids_ptr", "seeds_ptr", "positions_ptr", "best_ptr", "token_ptr"))
        return pointers, dict.fromkeys(("seeds_stride", "seeds_word_stride", "positions_stride"), 0)
    seeds, positions = draws_by
    check_column(op, "seeds", seeds, torch.int32, (batch, 2))
    check_column(op, "positions", positions, torch.int32, (batch,))
    arguments = {
        "ids_ptr": torch.empty((batch, capacity), dtype=torch.int32, device=seeds.device),
        "seeds_ptr": seeds,
        "positions_ptr": positions,
        "best_ptr": torch.empty((batch, parts), dtype=torch.float32, device=seeds.device),
        "token_ptr": torch.empty((batch, parts), dtype=torch.int32, device=seeds.device),
    }
    return arguments, {
        "seeds_stride": seeds.stride(0),
        "seeds_word_stride": seeds.stride(1),
        "positions_stride": positions.stride(0),
    }


def _plan_extremes(
    logits: torch.Tensor, extremes: torch.Tensor, sums: torch.Tensor, tile: int, tiles: int, vector: int
) -> Launch:
    """A warp of it takes a tile."""
    device, (batch, vocab_size) = logits.device, logits.shape
    return Launch(
        kernel=_extremes_kernel,
        grid=(cdiv(tiles, _WARPS), batch),
        args={
            "logits_ptr": logits,
            "extremes_ptr": extremes,
            "sums_ptr": sums,
            "logits_stride": logits.stride(0),
            "vocab_size": vocab_size,
            "tiles": tiles,
        },
        constexprs={
            "TILE": tile,
            "TILES_AT_ONCE": _WARPS,
            "WIDTH": min(32 * vector, tile),
            "PDL": supports_pdl(device),
        },
        options={"num_warps": _WARPS, **pdl_options(device)},
    )


def _plan(
    op: str,
    logits: torch.Tensor,
    columns: dict[str, torch.Tensor | None],
    draws_by: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    tile: int,
    capacity: int,
    hardware: bool | None,
) -> list[Launch]:
    """The five passes; with seeds and positions to draw by, out is for tokens."""
    check_logits(op, logits)
    check(
        capacity > 0 and capacity & (capacity - 1) == 0, op, lambda: f"capacity must be a power of two, not {capacity}"
    )
    device, (batch, vocab_size) = logits.device, logits.shape
    tile, tiles, lanes = tiling(vocab_size, tile)
    span = _span(tiles, batch, device)
    parts = cdiv(tiles, span)
    vector = 16 // logits.element_size()

    filters, strides = _filters(op, logits, columns)
    draw, draw_strides = _draw(op, draws_by, batch, capacity, parts)
    extremes = torch.empty((batch, 2, tiles), dtype=torch.float32, device=device)
    bounds = torch.empty((batch, BOUNDS.value), dtype=torch.float32, device=device)
    sums = torch.empty((batch, SUMS.value), dtype=torch.int64, device=device)
    listed = torch.empty((batch, capacity), dtype=logits.dtype, device=device)

    found = {"extremes_ptr": extremes, "bounds_ptr": bounds, "sums_ptr": sums}
    spans = {"vocab_size": vocab_size, "tiles": tiles, "span": span}
    rows = {"ROWS": min(32 * _WARPS, tile // vector), "VECTOR": vector}
    ways = {"HARDWARE": has_hardware_log(device) if hardware is None else hardware, "PDL": supports_pdl(device)}
    options = {"num_warps": _WARPS, **pdl_options(device)}
    coarse = Launch(
        kernel=_coarse_kernel,
        grid=(parts, batch),
        args={"logits_ptr": logits, **filters, **found, **strides, **spans},
        constexprs={"TILE": tile, "TILES": lanes, **rows, **ways},
        options=options,
    )
    fine = Launch(
        kernel=_fine_kernel,
        grid=(parts, batch),
        args={"logits_ptr": logits, **filters, **found, **strides, **spans},
        constexprs={"TILE": tile, **rows, "CAPACITY": capacity, **ways},
        options=options,
    )
    collect = Launch(
        kernel=_collect_kernel,
        grid=(parts, batch),
        args={"logits_ptr": logits, **filters, **found, "list_ptr": listed, **draw, **strides, **draw_strides, **spans},
        constexprs={"TILE": tile, **rows, "CAPACITY": capacity, **ways},
        options=options,
    )
    choice = Launch(
        kernel=_choice_kernel,
        grid=(batch,),
        args={
            "logits_ptr": logits,
            **filters,
            "bounds_ptr": bounds,
            "sums_ptr": sums,
            "list_ptr": listed,
            **draw,
            "out_ptr": out,
            **strides,
            **draw_strides,
            "vocab_size": vocab_size,
            "parts": parts,
        },
        constexprs={"PARTS": lanes, "FEW": min(_FEW, capacity), "CAPACITY": capacity, **ways},
        options={"num_warps": _CHOICE_WARPS, **pdl_options(device)},
    )
    return [_plan_extremes(logits, extremes, sums, tile, tiles, vector), coarse, fine, collect, choice]


def plan_kept_threshold(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    out: torch.Tensor,
    tile: int = KEPT_TILE,
    *,
    min_ps: torch.Tensor | None = None,
    capacity: int = CAPACITY,
    hardware: bool | None = None,
) -> list[Launch]:
    """Plan of `kept_threshold` into out fp32 [B], with scratch of its own.

    The result depends neither on the tile nor on the capacity of a list, a power of two. `hardware` defaults to whether
    the logits' device has powers and logs in hardware.
    """
    columns = {"temperatures": temperatures, "top_ks": top_ks, "top_ps": top_ps, "min_ps": min_ps}
    return _plan("kept_threshold", logits, columns, None, out, tile, capacity, hardware)


def plan_sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    tile: int = KEPT_TILE,
    *,
    min_ps: torch.Tensor | None = None,
    capacity: int = CAPACITY,
    hardware: bool | None = None,
) -> list[Launch]:
    """Plan of `sample_tokens` into out int32 [B], as `plan_kept_threshold`."""
    columns = {"temperatures": temperatures, "top_ks": top_ks, "top_ps": top_ps, "min_ps": min_ps}
    return _plan("sample_tokens", logits, columns, (seeds, positions), out, tile, capacity, hardware)


def kept_threshold(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor | None = None,
) -> torch.Tensor:
    """The smallest logit that each row keeps: token v of row b is kept if logits[b, v] >= threshold[b].

    Args:
        logits: [B, V] fp32, fp16 or bf16; rows may be strided.
        temperatures: fp32 [B], any stride, as the other parameters. Rows below `MIN_TEMPERATURE` use no filter.
        top_ks: int32 [B]; off where not in 1 .. V-1.
        top_ps: fp32 [B]; off where not below 1. At 0 or below only the largest logit stays (with its equals).
        min_ps: fp32 [B], or None for none; off where not above 0. At 1 only the largest logit stays.

    Returns:
        fp32 [B]: -inf for a row without a filter, NaN for a row that holds NaN; where min-p decides, the bound and not
        a logit.

    Raises:
        KernelError: shapes, dtypes or strides do not fit.
    """
    if not runs_kernel(logits):
        return reference.kept_threshold(logits, temperatures, top_ks, top_ps, min_ps)
    out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for launch in plan_kept_threshold(logits, temperatures, top_ks, top_ps, out, min_ps=min_ps):
        launch.run()
    return out
