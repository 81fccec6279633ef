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
    threshold  the exact answer, from the list if the exact sums show that it holds it, else from the whole row.
What is rough decides only how long the last pass takes. A pass skips tiles whose maximum is below all that is still in
question. The passes are always the same, so a CUDA graph can hold them.
"""

from __future__ import annotations

import torch

from tritonllm.kernels.dependent_launch import pdl_options
from tritonllm.kernels.kept_set_passes import (
    BOUNDS,
    SUMS,
    _coarse_kernel,
    _collect_kernel,
    _extremes_kernel,
    _fine_kernel,
)
from tritonllm.kernels.kept_set_search import _threshold_kernel
from tritonllm.kernels.launch import Launch, check, runs_kernel, supports_pdl
from tritonllm.kernels.logits import TILE, check_column, check_logits, tiling
from tritonllm.kernels.reference import sampling as reference

CAPACITY = 8192
"""Tokens that the list of a row takes."""
_FEW = 512
"""Tokens of a list that the last pass searches with one token a thread."""
_SUM_WARPS = 4  # of a tile that is summed: each warp adds what its threads hold to the others' by shuffles


def plan_kept_threshold(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    out: torch.Tensor,
    tile: int = TILE,
    *,
    min_ps: torch.Tensor | None = None,
    capacity: int = CAPACITY,
) -> list[Launch]:
    """Plan of `kept_threshold` into out fp32 [B], with scratch of its own.

    The result depends neither on the tile nor on the capacity of a list, a power of two.
    """
    op = "kept_threshold"
    check_logits(op, logits)
    batch, vocab_size = logits.shape
    check_column(op, "temperatures", temperatures, torch.float32, (batch,))
    check_column(op, "top_ks", top_ks, torch.int32, (batch,))
    check_column(op, "top_ps", top_ps, torch.float32, (batch,))
    if min_ps is not None:
        check_column(op, "min_ps", min_ps, torch.float32, (batch,))
    check(
        capacity > 0 and capacity & (capacity - 1) == 0, op, lambda: f"capacity must be a power of two, not {capacity}"
    )
    tile, tiles, lanes = tiling(vocab_size, tile)
    device = logits.device
    sums = torch.empty((batch, SUMS.value), dtype=torch.int64, device=device)
    bounds = torch.empty((batch, BOUNDS.value), dtype=torch.float32, device=device)
    extremes = torch.empty((batch, 2, tiles), dtype=torch.float32, device=device)
    listed = torch.empty((batch, capacity), dtype=logits.dtype, device=device)

    filters = {
        "temperatures_ptr": temperatures,
        "top_ks_ptr": top_ks,
        "top_ps_ptr": top_ps,
        "min_ps_ptr": min_ps,
    }
    sizes = {
        "logits_stride": logits.stride(0),
        "temperatures_stride": temperatures.stride(0),
        "top_ks_stride": top_ks.stride(0),
        "top_ps_stride": top_ps.stride(0),
        "min_ps_stride": 0 if min_ps is None else min_ps.stride(0),
        "vocab_size": vocab_size,
    }
    found = {"extremes_ptr": extremes, "bounds_ptr": bounds, "sums_ptr": sums}
    vector = 16 // logits.element_size()
    rows = {"ROWS": min(32 * _SUM_WARPS, tile // vector), "VECTOR": vector}
    pdl = {"PDL": supports_pdl(device)}
    options = {"num_warps": 8, **pdl_options(device)}
    sum_options = {"num_warps": _SUM_WARPS, **pdl_options(device)}

    measure = Launch(
        kernel=_extremes_kernel,
        grid=(tiles, batch),
        args={
            "logits_ptr": logits,
            "extremes_ptr": extremes,
            "sums_ptr": sums,
            "logits_stride": logits.stride(0),
            "vocab_size": vocab_size,
        },
        constexprs={"TILE": tile, **pdl},
        options=options,
    )
    coarse = Launch(
        kernel=_coarse_kernel,
        grid=(tiles, batch),
        args={"logits_ptr": logits, **filters, **found, **sizes},
        constexprs={"TILE": tile, "TILES": lanes, **rows, **pdl},
        options=sum_options,
    )
    fine = Launch(
        kernel=_fine_kernel,
        grid=(tiles, batch),
        args={"logits_ptr": logits, **filters, **found, **sizes},
        constexprs={"TILE": tile, **rows, "CAPACITY": capacity, **pdl},
        options=sum_options,
    )
    collect = Launch(
        kernel=_collect_kernel,
        grid=(tiles, batch),
        args={"logits_ptr": logits, **filters, **found, "list_ptr": listed, **sizes},
        constexprs={"TILE": tile, "CAPACITY": capacity, **pdl},
        options=options,
    )
    threshold = Launch(
        kernel=_threshold_kernel,
        grid=(batch,),
        args={
            "logits_ptr": logits,
            **filters,
            "bounds_ptr": bounds,
            "sums_ptr": sums,
            "list_ptr": listed,
            "out_ptr": out,
            **sizes,
        },
        constexprs={"CAPACITY": capacity, "FEW": min(_FEW, capacity), **pdl},
        options={"num_warps": 16, **pdl_options(device)},
    )
    return [measure, coarse, fine, collect, threshold]


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
