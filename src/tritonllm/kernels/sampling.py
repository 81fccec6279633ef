"""The next token of each row of logits [B, V].

    pick_tokens:    argmax of  logits + temperature * g        (g: Gumbel noise of `noise.py`; greedy without noise)
    sample_tokens:  the same, over the tokens that top-k, min-p and then top-p keep (the rule is in `kept_set.py`)

Rows below `MIN_TEMPERATURE` are greedy and use no filter. Of equal scores the lowest id wins. A row that holds NaN
gives -1. A logit of -inf is never chosen unless all are, which gives id 0. A row depends on nothing but its own logits
and parameters: not on its neighbours, its place in the batch, the tiles, or earlier calls.

Logits are taken to fp32; the score is rounded once. Without filters each tile of a row names its best token, a second
kernel the best of the tiles; with filters the passes of `kept_set.py` draw as they go.

A vocabulary may be split by columns: `pick_from_shard` names the best token of a part and its score, with the noise of
the ids in the whole, and `merge_picks` the best of the parts. The token is that of `pick_tokens` on the whole row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dependent_launch import pdl_options, start_after_previous
from tritonllm.kernels.kept_set import plan_sample_tokens
from tritonllm.kernels.launch import Launch, check, runs_kernel, supports_pdl
from tritonllm.kernels.logits import TILE, check_column, check_logits, tiling
from tritonllm.kernels.noise import MIN_TEMPERATURE, gumbel_tile, has_hardware_log, perturb
from tritonllm.kernels.reference import sampling as reference

_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _pick_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    best_ptr,
    token_ptr,
    logits_stride,
    temperatures_stride,
    seeds_stride,
    seeds_word_stride,
    positions_stride,
    vocab_size,
    TILE: tl.constexpr,
    FIRST_ID: tl.constexpr,
    HARDWARE_LOG: tl.constexpr,
    PDL: tl.constexpr,
):
    """Best score of a tile and the lowest id that has it, column 0 being FIRST_ID; id -1 if the tile holds NaN."""
    start_after_previous(PDL)
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row * temperatures_stride)
    column = tile * TILE + tl.arange(0, TILE)  # [TILE]
    token = FIRST_ID + column
    kept = column < vocab_size
    x = tl.load(logits_ptr + row * logits_stride + column, mask=kept, other=float("-inf")).to(tl.float32)
    has_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    kept = kept & (x == x)
    score = x
    if temperature >= MIN_TEMPERATURE:
        seed_low = tl.load(seeds_ptr + row * seeds_stride)
        seed_high = tl.load(seeds_ptr + row * seeds_stride + seeds_word_stride)
        position = tl.load(positions_ptr + row * positions_stride)
        noise = gumbel_tile(seed_low, seed_high, position, FIRST_ID + tile * TILE, TILE, HARDWARE_LOG)
        score = perturb(x, temperature, noise)
    best = tl.max(tl.where(kept, score, float("-inf")), axis=0)
    winner = tl.min(tl.where(kept & (score == best), token, _NO_TOKEN), axis=0)
    tl.store(best_ptr + row * tl.num_programs(0) + tile, best)
    tl.store(token_ptr + row * tl.num_programs(0) + tile, tl.where(has_nan, -1, winner))


@triton.jit
def _merge_kernel(best_ptr, token_ptr, out_ptr, score_ptr, tiles, TILES: tl.constexpr, PDL: tl.constexpr):
    """The best of a row's tiles: the lowest id at the highest score, or -1 if a tile says so; and that score."""
    start_after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILES)
    best = tl.load(best_ptr + row * tiles + lane, mask=lane < tiles, other=float("-inf"))  # [TILES]
    token = tl.load(token_ptr + row * tiles + lane, mask=lane < tiles, other=_NO_TOKEN)
    score = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == score, token, _NO_TOKEN), axis=0)
    tl.store(out_ptr + row, tl.where(tl.min(token, axis=0) < 0, -1, winner))
    if score_ptr is not None:
        tl.store(score_ptr + row, score)


def plan_pick_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    tile: int = TILE,
    *,
    scores: torch.Tensor | None = None,
    first_id: int = 0,
    hardware_log: bool | None = None,
) -> list[Launch]:
    """Plan of `pick_tokens` into out int32 [B], with scratch of its own; the result does not depend on the tile.

    Into scores, fp32 [B], goes what the tokens won with. Column 0 is token `first_id`, a multiple of 4. `hardware_log`
    defaults to whether the logits' device has it.
    """
    op = "pick_tokens"
    check(first_id >= 0 and first_id % 4 == 0, op, lambda: f"first_id must be a multiple of 4, not {first_id}")
    check_logits(op, logits)
    batch, vocab_size = logits.shape
    check_column(op, "temperatures", temperatures, torch.float32, (batch,))
    check_column(op, "seeds", seeds, torch.int32, (batch, 2))
    check_column(op, "positions", positions, torch.int32, (batch,))
    tile, tiles, lanes = tiling(vocab_size, tile)
    best = torch.empty((batch, tiles), dtype=torch.float32, device=logits.device)
    token = torch.empty((batch, tiles), dtype=torch.int32, device=logits.device)
    pick = Launch(
        kernel=_pick_kernel,
        grid=(tiles, batch),
        args={
            "logits_ptr": logits,
            "temperatures_ptr": temperatures,
            "seeds_ptr": seeds,
            "positions_ptr": positions,
            "best_ptr": best,
            "token_ptr": token,
            "logits_stride": logits.stride(0),
            "temperatures_stride": temperatures.stride(0),
            "seeds_stride": seeds.stride(0),
            "seeds_word_stride": seeds.stride(1),
            "positions_stride": positions.stride(0),
            "vocab_size": vocab_size,
        },
        constexprs={
            "TILE": tile,
            "FIRST_ID": first_id,
            "HARDWARE_LOG": has_hardware_log(logits.device) if hardware_log is None else hardware_log,
            "PDL": supports_pdl(logits.device),
        },
        options={"num_warps": 8, **pdl_options(logits.device)},
    )
    return [pick, _plan_merge(best, token, out, scores, lanes)]


def _plan_merge(
    best: torch.Tensor, token: torch.Tensor, out: torch.Tensor, scores: torch.Tensor | None, lanes: int
) -> Launch:
    return Launch(
        kernel=_merge_kernel,
        grid=(best.shape[0],),
        args={"best_ptr": best, "token_ptr": token, "out_ptr": out, "score_ptr": scores, "tiles": best.shape[1]},
        constexprs={"TILES": lanes, "PDL": supports_pdl(best.device)},
        options={"num_warps": 1, **pdl_options(best.device)},
    )


def plan_merge_picks(scores: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> Launch:
    """Plan of `merge_picks` into out int32 [B]."""
    op = "merge_picks"
    batch, parts = scores.shape
    check_column(op, "scores", scores, torch.float32, (batch, parts))
    check_column(op, "tokens", tokens, torch.int32, (batch, parts))
    check(
        scores.is_contiguous() and tokens.is_contiguous(),
        op,
        lambda: f"scores and tokens must be contiguous, not of strides {scores.stride()} and {tokens.stride()}",
    )
    return _plan_merge(scores, tokens, out, None, triton.next_power_of_2(parts))


def pick_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The most likely token of each row, or a draw from softmax(logits / temperature).

    Args:
        logits: [B, V] fp32, fp16 or bf16; rows may be strided.
        temperatures: fp32 [B], any stride, as the other parameters. Below `MIN_TEMPERATURE` the row is greedy.
        seeds: int32 [B, 2], low and high word of a 64-bit seed.
        positions: int32 [B]; a draw is a function of seed and position.

    Returns:
        int32 [B]: token ids, -1 for a row that holds NaN.

    Raises:
        KernelError: shapes, dtypes or strides do not fit.
    """
    if not runs_kernel(logits):
        return reference.pick_tokens(logits, temperatures, seeds, positions)
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    for launch in plan_pick_tokens(logits, temperatures, seeds, positions, out):
        launch.run()
    return out


def pick_from_shard(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pick_tokens` over the part of a vocabulary whose first token is `first_id`.

    Args:
        logits, temperatures, seeds, positions: as for `pick_tokens`; V is the size of the part, at least 1.
        first_id: a multiple of 4, since one call of the noise serves four ids.

    Returns:
        `(scores, tokens)`, fp32 and int32 [B], as `merge_picks` takes them: tokens are ids of the whole vocabulary, -1
        for a row that holds NaN.

    Raises:
        KernelError: shapes, dtypes, strides or `first_id` do not fit.
    """
    if not runs_kernel(logits):
        return reference.pick_from_shard(logits, temperatures, seeds, positions, first_id)
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    scores = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for launch in plan_pick_tokens(logits, temperatures, seeds, positions, out, scores=scores, first_id=first_id):
        launch.run()
    return scores, out


def merge_picks(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The token that wins over all parts of a vocabulary: the lowest id of those with the highest score.

    Args:
        scores, tokens: contiguous fp32 and int32 [B, parts], what `pick_from_shard` gave for each part.

    Returns:
        int32 [B]: token ids, -1 for a row of which a part holds NaN.

    Raises:
        KernelError: shapes, dtypes or strides do not fit.
    """
    if not runs_kernel(scores):
        return reference.merge_picks(scores, tokens)
    out = torch.empty(scores.shape[0], dtype=torch.int32, device=scores.device)
    plan_merge_picks(scores, tokens, out).run()
    return out


def sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    min_ps: torch.Tensor | None = None,
) -> torch.Tensor:
    """A draw from what top-k, min-p and then top-p keep; a row that uses none gets the token of `pick_tokens`.

    Args:
        logits, temperatures, seeds, positions: as for `pick_tokens`.
        top_ks, top_ps: int32 [B] and fp32 [B], as for `kept_threshold`: 0 and 1 are off.
        min_ps: fp32 [B], 0 being off, or None.

    Returns:
        int32 [B]: token ids, -1 for a row that holds NaN.

    Raises:
        KernelError: shapes, dtypes or strides do not fit.
    """
    if not runs_kernel(logits):
        return reference.sample_tokens(logits, temperatures, top_ks, top_ps, seeds, positions, min_ps)
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    for launch in plan_sample_tokens(logits, temperatures, top_ks, top_ps, seeds, positions, out, min_ps=min_ps):
        launch.run()
    return out
