"""Log probabilities of tokens under the model: of one given token a row, and of the likeliest ones. No sort of a row.

    logprob(v) = x[v] - log(sum over u of exp(x[u]))

of the logits as they are: no temperature, penalty or filter. In float32, whatever the logits are. Each tile of a row
gives its maximum, its sum, its largest logits and how many are above that of the given token; a second kernel merges
the tiles in their order, so a result depends on the row alone. Of equal logits the lower id comes first. A row that
holds NaN or +inf has NaN for every log probability, as a softmax has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonllm.kernels.launch import Launch, check, runs_kernel
from tritonllm.kernels.logits import TILE, check_column, check_logits, tiling
from tritonllm.kernels.reference import logits as reference

MAX_TOP = 32
"""Most tokens that are reported beside the given one: a tile sorts that many."""


@triton.jit
def _packed(x, token):
    """int64 whose order is that of logits, the lower id being the larger of equals."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _tile_kernel(
    logits_ptr,
    tokens_ptr,
    wanted_ptr,
    sums_ptr,
    above_ptr,
    packed_ptr,
    logits_stride,
    tokens_stride,
    wanted_stride,
    vocab_size,
    TILE: tl.constexpr,
    TOP: tl.constexpr,
):
    """Of a tile: its maximum and sum of exp(x - maximum), the logits above the given one, the TOP largest in order."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(wanted_ptr + row * wanted_stride) <= 0:
        return
    place = row * tl.num_programs(0) + tile
    row_ptr = logits_ptr + row * logits_stride
    token = tile * TILE + tl.arange(0, TILE)  # [TILE]
    x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    given = tl.load(tokens_ptr + row * tokens_stride)
    known = (given >= 0) & (given < vocab_size)
    chosen = tl.load(row_ptr + given, mask=known, other=float("nan")).to(tl.float32)
    largest = tl.max(tl.where(x == x, x, float("-inf")), axis=0)
    mass = tl.exp(x - tl.where(largest > float("-inf"), largest, 0.0))
    tl.store(sums_ptr + place * 2, largest)
    tl.store(sums_ptr + place * 2 + 1, tl.sum(mass, axis=0))
    tl.store(above_ptr + place, tl.sum((x > chosen).to(tl.int32), axis=0))
    if TOP > 0:
        tl.store(packed_ptr + place * TOP + tl.arange(0, TOP), tl.topk(_packed(x, token), TOP))


@triton.jit
def _merge_kernel(
    logits_ptr,
    tokens_ptr,
    wanted_ptr,
    sums_ptr,
    above_ptr,
    packed_ptr,
    logprobs_ptr,
    ids_ptr,
    ranks_ptr,
    logits_stride,
    tokens_stride,
    wanted_stride,
    vocab_size,
    tiles,
    TILES: tl.constexpr,
    NUM_TOP: tl.constexpr,
    TOP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)  # the given token, then the largest
    outputs = column < 1 + NUM_TOP
    logprobs_ptrs = logprobs_ptr + row * (1 + NUM_TOP) + column
    ids_ptrs = ids_ptr + row * (1 + NUM_TOP) + column
    if tl.load(wanted_ptr + row * wanted_stride) <= 0:
        tl.store(logprobs_ptrs, tl.full([COLUMNS], float("nan"), tl.float32), mask=outputs)
        tl.store(ids_ptrs, tl.full([COLUMNS], -1, tl.int32), mask=outputs)
        tl.store(ranks_ptr + row, 0)
        return
    lane = tl.arange(0, TILES)
    sums_ptrs = sums_ptr + (row * tiles + lane) * 2
    largest = tl.load(sums_ptrs, mask=lane < tiles, other=float("-inf"))  # [TILES]
    mass = tl.load(sums_ptrs + 1, mask=lane < tiles, other=0.0)
    highest = tl.max(largest, axis=0)
    total = tl.sum(tl.where(mass != 0.0, mass * tl.exp(largest - highest), 0.0), axis=0)
    normalizer = highest + tl.log(total)
    if TOP > 0:
        entry = tl.arange(0, TILES * TOP)
        packed = tl.load(packed_ptr + row * tiles * TOP + entry, mask=entry < tiles * TOP, other=-0x7FFFFFFFFFFFFFFF)
        best = tl.topk(packed, TOP)  # [TOP]
        key = (best >> 32).to(tl.int32)
        x = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        place = tl.arange(0, TOP)
        listed = place < NUM_TOP
        tl.store(logprobs_ptr + row * (1 + NUM_TOP) + 1 + place, x - normalizer, mask=listed)
        token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        tl.store(ids_ptr + row * (1 + NUM_TOP) + 1 + place, token, mask=listed)
    given = tl.load(tokens_ptr + row * tokens_stride)
    above = tl.sum(tl.load(above_ptr + row * tiles + lane, mask=lane < tiles, other=0), axis=0)
    known = (given >= 0) & (given < vocab_size)
    chosen = tl.load(logits_ptr + row * logits_stride + given, mask=known, other=float("nan")).to(tl.float32)
    tl.store(logprobs_ptr + row * (1 + NUM_TOP), chosen - normalizer)
    tl.store(ids_ptr + row * (1 + NUM_TOP), tl.where(known, given, -1))
    tl.store(ranks_ptr + row, tl.where(known, above + 1, 0))


def plan_token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    wanted: torch.Tensor,
    logprobs: torch.Tensor,
    ids: torch.Tensor,
    ranks: torch.Tensor,
    tile: int = TILE,
) -> list[Launch]:
    """Plan of `token_logprobs` into logprobs fp32 and ids int32 [B, 1 + num_top] and ranks int32 [B]."""
    op = "token_logprobs"
    check_logits(op, logits)
    batch, vocab_size = logits.shape
    check_column(op, "tokens", tokens, torch.int32, (batch,))
    check_column(op, "wanted", wanted, torch.int32, (batch,))
    num_top = logprobs.shape[1] - 1
    check(
        0 <= num_top <= min(MAX_TOP, vocab_size),
        op,
        lambda: f"num_top must be from 0 to {min(MAX_TOP, vocab_size)}, not {num_top}",
    )
    top = max(triton.next_power_of_2(num_top), 2) if num_top else 0  # Triton 3.6 cannot take the top 1
    tile, tiles, lanes = tiling(vocab_size, tile)
    tile = max(tile, top)
    sums = torch.empty((batch, tiles, 2), dtype=torch.float32, device=logits.device)
    above = torch.empty((batch, tiles), dtype=torch.int32, device=logits.device)
    packed = torch.empty((batch, tiles, max(top, 1)), dtype=torch.int64, device=logits.device)
    inputs = {"logits_ptr": logits, "tokens_ptr": tokens, "wanted_ptr": wanted}
    scratch = {"sums_ptr": sums, "above_ptr": above, "packed_ptr": packed}
    strides = {
        "logits_stride": logits.stride(0),
        "tokens_stride": tokens.stride(0),
        "wanted_stride": wanted.stride(0),
        "vocab_size": vocab_size,
    }
    tile_launch = Launch(
        kernel=_tile_kernel,
        grid=(tiles, batch),
        args={**inputs, **scratch, **strides},
        constexprs={"TILE": tile, "TOP": top},
        options={"num_warps": 8},
    )
    merge = Launch(
        kernel=_merge_kernel,
        grid=(batch,),
        args={
            **inputs,
            **scratch,
            "logprobs_ptr": logprobs,
            "ids_ptr": ids,
            "ranks_ptr": ranks,
            **strides,
            "tiles": tiles,
        },
        constexprs={"TILES": lanes, "NUM_TOP": num_top, "TOP": top, "COLUMNS": triton.next_power_of_2(1 + num_top)},
        options={"num_warps": 4},
    )
    return [tile_launch, merge]


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities of one token a row and of the num_top likeliest tokens of the row.

    Args:
        logits: [B, V] fp32, fp16 or bf16; rows may be strided.
        tokens: int32 [B], any stride: the token of each row; -1 for none.
        wanted: int32 [B], any stride: rows where it is not above 0 are left out.
        num_top: from 0 to `MAX_TOP`, at most V. Compiled in.

    Returns:
        `(logprobs, ids, ranks)`: fp32 and int32 [B, 1 + num_top], the row's token and then the likeliest ones, the
        largest logit first and the lower id first among equals; and int32 [B], one more than the number of logits
        above that of the row's token. NaN, -1 and 0 in rows left out and for a token of -1.

    Raises:
        KernelError: shapes, dtypes or strides do not fit, or num_top is out of range.
    """
    if not runs_kernel(logits):
        return reference.token_logprobs(logits, tokens, wanted, num_top)
    batch, device = logits.shape[0], logits.device
    check(num_top >= 0, "token_logprobs", lambda: f"num_top must be at least 0, not {num_top}")
    logprobs = torch.empty((batch, 1 + num_top), dtype=torch.float32, device=device)
    ids = torch.empty((batch, 1 + num_top), dtype=torch.int32, device=device)
    ranks = torch.empty(batch, dtype=torch.int32, device=device)
    for launch in plan_token_logprobs(logits, tokens, wanted, logprobs, ids, ranks):
        launch.run()
    return logprobs, ids, ranks
