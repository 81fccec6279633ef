"""What a request says about tokens, applied to logits before the choice: bias, penalties, and what is forbidden.

    y = x + bias[v]                                  of the row's list
    y = y / r if y > 0 else y * r                    for tokens of the prompt or the output
    y = y - frequency * count[v] - presence          for tokens of the output, count[v] times in it
    y = -inf                                         for tokens that are not allowed, or not yet, or end a bad word

The order is vLLM's. r is the repetition penalty of Keskar et al., "CTRL" (2019), presence and frequency are those of
OpenAI's API. Everything is computed in float32 and stays so. NaN stays NaN, so that a broken row is found also where a
token is forbidden; a row without any of this is copied.

What happened to each token is one int16 word a row and token: the sign bit says that it is in the prompt, the other 15
how often it is in the output, at most 32,767 times. The newest token of a row is counted here, once a step, so counting
needs no launch of its own and no host. An entry of the list of biases is three int32: a token, the float32 bits of what
is added (-inf forbids), and the context length below which the token is forbidden (0 for never). The mask of allowed
tokens has a bit a token, the lowest bit of a word first, as grammar libraries write it.

Bad words, and the newest tokens that they are compared with, are described in `bad_words`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonllm.kernels.bad_words import BLOCK_WORDS, forbidden_by_words
from tritonllm.kernels.launch import Launch, cdiv, check, runs_kernel, shape_of
from tritonllm.kernels.logits import TILE, check_logits, tiling
from tritonllm.kernels.reference import logits as reference
from tritonllm.kernels.row_layout import (
    CONTEXT_LEN,
    CONTROLS,
    FREQUENCY_PENALTY,
    HAS_MASK,
    HAS_PENALTIES,
    HEADER,
    NUM_BAD_WORDS,
    NUM_BIASES,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    TOKEN,
)

_BLOCK = 256  # entries of a list of biases that one program applies
_LAYOUT = {
    "TOKEN": TOKEN,
    "CONTEXT_LEN": CONTEXT_LEN,
    "REPETITION_PENALTY": REPETITION_PENALTY,
    "PRESENCE_PENALTY": PRESENCE_PENALTY,
    "FREQUENCY_PENALTY": FREQUENCY_PENALTY,
    "CONTROLS": CONTROLS,
    "HAS_PENALTIES": HAS_PENALTIES,
    "HAS_MASK": HAS_MASK,
}


@triton.jit
def _float_of(row_ptr, COLUMN: tl.constexpr):
    return tl.load(row_ptr + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def _penalized(
    x,
    word,
    row_ptr,
    REPETITION_PENALTY: tl.constexpr,
    PRESENCE_PENALTY: tl.constexpr,
    FREQUENCY_PENALTY: tl.constexpr,
):
    """Logits x after the penalties of a row. Divided and fused as spelled out: both kernels give the same bits."""
    zero = tl.full(x.shape, 0.0, tl.float32)
    repetition = zero + _float_of(row_ptr, REPETITION_PENALTY)
    repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(word != 0, repeated, x)
    count = (word.to(tl.int32) & 0x7FFF).to(tl.float32)
    fewer = tl.fma(zero - _float_of(row_ptr, FREQUENCY_PENALTY), count, x) - _float_of(row_ptr, PRESENCE_PENALTY)
    return tl.where(count > 0, fewer, x)


@triton.jit
def _is_allowed(mask_ptr, token, kept):
    words = tl.load(mask_ptr + token // 32, mask=kept, other=0)
    return ((words >> (token % 32)) & 1) > 0


@triton.jit
def _adjust_kernel(
    logits_ptr,
    rows_ptr,
    counts_ptr,
    masks_ptr,
    out_ptr,
    logits_stride,
    row_stride,
    counts_stride,
    masks_stride,
    vocab_size,
    TILE: tl.constexpr,
    TOKEN: tl.constexpr,
    CONTEXT_LEN: tl.constexpr,
    REPETITION_PENALTY: tl.constexpr,
    PRESENCE_PENALTY: tl.constexpr,
    FREQUENCY_PENALTY: tl.constexpr,
    CONTROLS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """A tile of logits in float32, with penalties and mask; counts the newest token if it lies in the tile."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row_ptr = rows_ptr + row * row_stride
    token = tile * TILE + tl.arange(0, TILE)  # [TILE]
    inside = token < vocab_size
    x = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=0.0).to(tl.float32)
    controls = tl.load(row_ptr + CONTROLS)
    if tl.load(row_ptr + CONTEXT_LEN) <= 0:
        controls = 0
    if (controls & HAS_PENALTIES) > 0:
        word_ptrs = counts_ptr + row * counts_stride + token
        word = tl.load(word_ptrs, mask=inside, other=0).to(tl.int32)
        newest = inside & (token == tl.load(row_ptr + TOKEN)) & ((word & 0x7FFF) < 0x7FFF)
        word = tl.where(newest, word + 1, word)
        tl.store(word_ptrs, word.to(tl.int16), mask=newest)
        x = _penalized(x, word, row_ptr, REPETITION_PENALTY, PRESENCE_PENALTY, FREQUENCY_PENALTY)
    if (controls & HAS_MASK) > 0:
        allowed = _is_allowed(masks_ptr + row * masks_stride, token, inside)
        x = tl.where(allowed | (x != x), x, float("-inf"))
    tl.store(out_ptr + row * vocab_size + token, x, mask=inside)


@triton.jit
def _list_kernel(
    logits_ptr,
    rows_ptr,
    counts_ptr,
    masks_ptr,
    biases_ptr,
    words_ptr,
    recent_ptr,
    out_ptr,
    logits_stride,
    row_stride,
    counts_stride,
    masks_stride,
    biases_stride,
    words_stride,
    recent_stride,
    vocab_size,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_BIASES: tl.constexpr,
    NUM_BAD_WORDS: tl.constexpr,
    TOKEN: tl.constexpr,
    CONTEXT_LEN: tl.constexpr,
    REPETITION_PENALTY: tl.constexpr,
    PRESENCE_PENALTY: tl.constexpr,
    FREQUENCY_PENALTY: tl.constexpr,
    CONTROLS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """The tokens that a row lists: those with a bias from their logits on, with the counts that `_adjust_kernel` left,
    and those that end bad words, which more than one program may forbid; notes the newest token for later."""
    row = tl.program_id(1).to(tl.int64)
    row_ptr = rows_ptr + row * row_stride
    words_ptr += row * words_stride
    recent_ptr += row * recent_stride
    context_len = tl.load(row_ptr + CONTEXT_LEN)
    num_biases = tl.load(row_ptr + NUM_BIASES)
    num_words = tl.load(row_ptr + NUM_BAD_WORDS)
    first = tl.program_id(0) * BLOCK
    if (context_len <= 0) | ((first >= num_biases) & (num_words == 0)):
        return
    if first < num_biases:
        entry = first + tl.arange(0, BLOCK)  # [BLOCK]
        listed = entry < num_biases
        entry_ptrs = biases_ptr + row * biases_stride + entry * 3
        token = tl.load(entry_ptrs, mask=listed, other=0)
        kept = listed & (token >= 0) & (token < vocab_size)
        bias = tl.load(entry_ptrs + 1, mask=kept, other=0).to(tl.float32, bitcast=True)
        min_length = tl.load(entry_ptrs + 2, mask=kept, other=0)
        x = tl.load(logits_ptr + row * logits_stride + token, mask=kept, other=0.0).to(tl.float32)
        forbidden = (bias == float("-inf")) | (context_len < min_length)
        x = x + tl.where(forbidden, 0.0, bias)
        controls = tl.load(row_ptr + CONTROLS)
        if (controls & HAS_PENALTIES) > 0:
            word = tl.load(counts_ptr + row * counts_stride + token, mask=kept, other=0).to(tl.int32)
            x = _penalized(x, word, row_ptr, REPETITION_PENALTY, PRESENCE_PENALTY, FREQUENCY_PENALTY)
        if (controls & HAS_MASK) > 0:
            forbidden = forbidden | (_is_allowed(masks_ptr + row * masks_stride, token, kept) == 0)
        for start in range(0, num_words, WORDS):
            ends = forbidden_by_words(
                row_ptr, words_ptr, recent_ptr, start, num_words, WORDS, WIDTH, TOKEN, CONTEXT_LEN
            )
            found = (token[:, None] == ends[None, :]).to(tl.int32)  # [BLOCK, WORDS]
            forbidden = forbidden | (tl.max(found, axis=1) > 0)
        x = tl.where(forbidden & (x == x), float("-inf"), x)
        tl.store(out_ptr + row * vocab_size + token, x, mask=kept)
    for start in range(tl.program_id(0) * WORDS, num_words, tl.num_programs(0) * WORDS):
        token = forbidden_by_words(row_ptr, words_ptr, recent_ptr, start, num_words, WORDS, WIDTH, TOKEN, CONTEXT_LEN)
        kept = (token >= 0) & (token < vocab_size)
        x = tl.load(logits_ptr + row * logits_stride + token, mask=kept, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * vocab_size + token, float("-inf"), mask=kept & (x == x))
    # Programs that run beside this one read the newest token from its row, so they do not see this.
    newest = tl.load(row_ptr + TOKEN)
    if (tl.program_id(0) == 0) & (num_words > 0) & (newest >= 0):
        tl.store(recent_ptr + (context_len - 1) % WIDTH, newest)


def _check_matrix(op: str, name: str, matrix: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(
        matrix.dtype == dtype and matrix.shape == shape and matrix.is_contiguous(),
        op,
        lambda: f"{name} must be contiguous {str(dtype).removeprefix('torch.')}{list(shape)}, not {shape_of(matrix)}",
    )


def plan_adjust_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    masks: torch.Tensor,
    biases: torch.Tensor,
    bad_words: torch.Tensor,
    recent: torch.Tensor,
    out: torch.Tensor,
    tile: int = TILE,
) -> list[Launch]:
    """Plan of `adjust_logits` into out, contiguous fp32 [B, V]; the result does not depend on the tile."""
    op = "adjust_logits"
    check_logits(op, logits)
    batch, vocab_size = logits.shape
    check(
        rows.dim() == 2
        and rows.dtype == torch.int32
        and rows.shape[0] == batch
        and rows.shape[1] >= HEADER
        and rows.stride(1) == 1,
        op,
        lambda: (
            f"rows must be int32[{batch}, at least {HEADER}] with stride 1 along the last axis, not {shape_of(rows)}"
        ),
    )
    _check_matrix(op, "counts", counts, torch.int16, (batch, vocab_size))
    _check_matrix(op, "masks", masks, torch.int32, (batch, cdiv(vocab_size, 32)))
    num_biases = biases.shape[1] if biases.dim() == 3 else -1
    _check_matrix(op, "biases", biases, torch.int32, (batch, num_biases, 3))
    width = recent.shape[1] if recent.dim() == 2 else -1
    _check_matrix(op, "recent", recent, torch.int32, (batch, width))
    check(
        width > 0 and width & (width - 1) == 0,
        op,
        lambda: f"recent must be a power of two wide, not {shape_of(recent)}",
    )
    num_words = bad_words.shape[1] if bad_words.dim() == 3 else -1
    _check_matrix(op, "bad_words", bad_words, torch.int32, (batch, num_words, width))
    _check_matrix(op, "out", out, torch.float32, (batch, vocab_size))
    tile, tiles, _ = tiling(vocab_size, tile)
    matrices = {"logits_ptr": logits, "rows_ptr": rows, "counts_ptr": counts, "masks_ptr": masks}
    strides = {
        "logits_stride": logits.stride(0),
        "row_stride": rows.stride(0),
        "counts_stride": counts.stride(0),
        "masks_stride": masks.stride(0),
    }
    adjust = Launch(
        kernel=_adjust_kernel,
        grid=(tiles, batch),
        args={**matrices, "out_ptr": out, **strides, "vocab_size": vocab_size},
        constexprs={"TILE": tile, **_LAYOUT},
        options={"num_warps": 8},
    )
    listed = Launch(
        kernel=_list_kernel,
        grid=(max(1, cdiv(num_biases, _BLOCK)), batch),
        args={
            **matrices,
            "biases_ptr": biases,
            "words_ptr": bad_words,
            "recent_ptr": recent,
            "out_ptr": out,
            **strides,
            "biases_stride": biases.stride(0),
            "words_stride": bad_words.stride(0),
            "recent_stride": recent.stride(0),
            "vocab_size": vocab_size,
        },
        constexprs={
            "BLOCK": _BLOCK,
            "WORDS": BLOCK_WORDS,
            "WIDTH": width,
            "NUM_BIASES": NUM_BIASES,
            "NUM_BAD_WORDS": NUM_BAD_WORDS,
            **_LAYOUT,
        },
        options={"num_warps": 4},
    )
    return [adjust, listed]


def adjust_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    masks: torch.Tensor,
    biases: torch.Tensor,
    bad_words: torch.Tensor,
    recent: torch.Tensor,
) -> torch.Tensor:
    """Logits after bias, penalties, masks and bad words of each row; takes in the newest token of each first.

    Args:
        logits: [B, V] fp32, fp16 or bf16; rows may be strided.
        rows: int32 [B, >= HEADER], the columns of `row_layout`; rows may be strided. With HAS_PENALTIES the TOKEN is
            counted, and with NUM_BAD_WORDS it is noted, unless it is no token: -1 where all have been.
        counts: int16 [B, V], contiguous, the words that the module describes; changed.
        masks: int32 [B, ceil(V / 32)], contiguous: read with HAS_MASK.
        biases: int32 [B, N, 3], contiguous: the first NUM_BIASES entries of a row are read, their tokens all different.
        bad_words: int32 [B, M, W], contiguous, W a power of two: the first NUM_BAD_WORDS entries of a row are read.
        recent: int32 [B, W], contiguous, the rings that the module describes; changed.

    Returns:
        fp32 [B, V]. Rows of context length 0 are copied.

    Raises:
        KernelError: shapes, dtypes or strides do not fit.
    """
    if not runs_kernel(logits):
        return reference.adjust_logits(logits, rows, counts, masks, biases, bad_words, recent)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    for launch in plan_adjust_logits(logits, rows, counts, masks, biases, bad_words, recent, out):
        launch.run()
    return out
