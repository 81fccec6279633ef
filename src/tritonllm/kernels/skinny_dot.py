"""The forms of `skinny_linear` for 2 to 16 tokens: the weight is the left operand of a matrix product, x^T the right.

A step may divide its part of the sum over K into SPLIT parts, a leading axis of all tiles: parts go to different warps,
so that a program of few rows keeps several warps busy. A gated tile stacks BLOCK_N gate rows and BLOCK_N up rows.
"""

# A jitted body is Triton, where a tuple may grow:
# mypy: disable-error-code="assignment,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from tritonllm.kernels.dependent_launch import launch_dependents, wait_for_previous
from tritonllm.kernels.norm import inverse_rms, scale_and_weigh
from tritonllm.kernels.skinny_gemv import finish, load_weight, load_whole


@triton.jit
def _axes(first_row, N, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
          SPLIT: tl.constexpr):  # fmt: skip
    """Indices of a weight tile [ROWS, BLOCK_K] and an x tile [BLOCK_K, BLOCK_M], behind an axis of SPLIT parts if there
    are several: row (and whether it exists) and column of the weight, column and token of x."""
    n, k, m = tl.arange(0, ROWS), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M)
    exists = first_row + n % BLOCK_N < N
    row = (first_row + n % BLOCK_N).to(tl.int64) + n // BLOCK_N * N
    if SPLIT == 1:
        return row[:, None], exists[:, None], k[None, :], k[:, None], m[None, :]
    else:
        part = tl.arange(0, SPLIT)[:, None, None] * BLOCK_K
        weight_axes = row[None, :, None], exists[None, :, None], part + k[None, None, :]
        return weight_axes + (part + k[None, :, None], m[None, None, :])


@triton.jit
def _load_residual(pointer, first_row, num_tokens, stride, N, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """What is added to a tile of outputs, [BLOCK_N, BLOCK_M]."""
    row, token = first_row + tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_M)[None, :]
    mask = (row < N) & (token < num_tokens)
    return tl.load(pointer + token.to(tl.int64) * stride + row, mask=mask, other=0.0)


@triton.jit
def _load_bias(pointer, first_row, N, BLOCK_N: tl.constexpr):
    """Biases of a tile's rows, [BLOCK_N, 1]."""
    row = first_row + tl.arange(0, BLOCK_N)[:, None]
    return tl.load(pointer + row, mask=row < N, other=0.0)


@triton.jit
def _add_parts(acc):
    """Sum over the leading axis, by halves.

    `tl.sum` over parts of several warps passes through shared memory twice, and what it gives once more on its way to
    another layout. Here the parts change threads once, straight into the layout that the sum is used in.
    """
    if acc.shape[0] == 1:
        return tl.reshape(acc, [acc.shape[1], acc.shape[2]])
    else:
        halves = tl.reshape(acc, [2, acc.shape[0] // 2, acc.shape[1], acc.shape[2]])
        first, second = tl.split(tl.permute(halves, [1, 2, 3, 0]))
        return _add_parts(first + second)


@triton.jit
def _store_outputs(
    acc, bias, up_bias, residual, out_ptr, first_row, num_tokens, out_stride, N,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a tile, finish its outputs and write them."""
    if SPLIT > 1:
        acc = _add_parts(acc)
    if GATED:
        product, up = tl.split(tl.permute(tl.reshape(acc, [2, BLOCK_N, BLOCK_M]), [1, 2, 0]))
    else:
        product, up = acc, None
    y = finish(product, up, bias, up_bias, residual, out_ptr.dtype.element_ty, GATED, ACTIVATION)
    row, token = first_row + tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_M)[None, :]
    tl.store(out_ptr + token.to(tl.int64) * out_stride + row, y, mask=(row < N) & (token < num_tokens))


@triton.jit
def _line_and_column(LINES: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr):
    """Where the elements of a flat tile [LINES * SPLIT * BLOCK_K / 32, 32] lie in LINES rows of W, or tokens.

    It is made so that the layout of its load has a warp for a part, and in that eight lines of four threads each.
    """
    index = tl.arange(0, LINES * SPLIT * BLOCK_K // 32)[:, None]
    line = index % 8 + index // (8 * SPLIT) % (LINES // 8) * 8
    column = index // 8 % SPLIT * BLOCK_K + index // (LINES * SPLIT) * 32
    return line, column + tl.arange(0, 32)[None, :]


@triton.jit
def _unfold(tile, LINES: tl.constexpr, SPLIT: tl.constexpr):
    """A flat tile with an axis for each: [BLOCK_K / 32, LINES / 8, SPLIT, 8, 32]."""
    return tl.reshape(tile, [tile.shape[0] // (LINES * SPLIT), LINES // 8, SPLIT, 8, 32])


@triton.jit
def _load_tokens(x_ptrs, token, x_column, num_tokens, K):
    """A tile of x, 0 where there is no token or no column."""
    x_mask = (token < num_tokens) & (x_column < K)
    return tl.load(x_ptrs, mask=x_mask, other=0.0)


@triton.jit
def _as_operand(tile):
    """An unfolded tile as [SPLIT, LINES, BLOCK_K], with the columns of each 32 in another order.

    Both operands have the same order: eight neighbours, which a thread reads at once, become those that it holds of an
    operand. So both go from memory to the tensor cores without changing threads.
    """
    PIECES: tl.constexpr = tile.shape[0]
    EIGHTS: tl.constexpr = tile.shape[1]
    SPLIT: tl.constexpr = tile.shape[2]
    tile = tl.reshape(tile, [PIECES, EIGHTS, SPLIT, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(tile, [2, 1, 3, 0, 5, 6, 4, 7]), [SPLIT, EIGHTS * 8, PIECES * 32])


@triton.jit(do_not_specialize=["num_tokens"])
def _direct_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    num_tokens,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Any K, in steps of SPLIT * BLOCK_K through registers, STAGES of them in flight, the first of these before the
    wait. SPLIT >= 2."""
    if PDL:
        launch_dependents()
    ROWS: tl.constexpr = BLOCK_N * (2 if GATED else 1)
    STEP: tl.constexpr = SPLIT * BLOCK_K
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    AHEAD: tl.constexpr = min(STAGES, STEPS)
    WHOLE_K: tl.constexpr = K % STEP == 0
    first_row = tl.program_id(0) * BLOCK_N
    n, column = _line_and_column(ROWS, BLOCK_K, SPLIT)
    row = (first_row + n % BLOCK_N).to(tl.int64) + n // BLOCK_N * N
    row_exists = first_row + n % BLOCK_N < N
    weight_ptrs = weight_ptr + row * K + column
    token, x_column = _line_and_column(BLOCK_M, BLOCK_K, SPLIT)
    x_ptrs = x_ptr + token.to(tl.int64) * x_stride + x_column
    norm_column = _line_and_column(8, BLOCK_K, SPLIT)[1]  # of eight equal lines, in the layout of x

    bias, up_bias, residual = None, None, None
    if bias_ptr is not None:
        bias = _load_bias(bias_ptr, first_row, N, BLOCK_N)
        if GATED:
            up_bias = _load_bias(bias_ptr + N, first_row, N, BLOCK_N)
    weights, xs, norms = (), (), ()
    for step in tl.static_range(AHEAD):
        mask = row_exists & (column < K - step * STEP)
        weights = weights + (load_weight(weight_ptrs + step * STEP, mask, WHOLE_K and N % BLOCK_N == 0),)
    if norm_ptr is not None:
        for step in tl.static_range(AHEAD):
            mask = norm_column < K - step * STEP
            norms = norms + (load_whole(norm_ptr + step * STEP + norm_column, mask, WHOLE_K),)
    if PDL:
        wait_for_previous()

    for step in tl.static_range(AHEAD):
        xs = xs + (_load_tokens(x_ptrs + step * STEP, token, x_column, num_tokens, K - step * STEP),)
    if residual_ptr is not None:
        residual = _load_residual(residual_ptr, first_row, num_tokens, residual_stride, N, BLOCK_N, BLOCK_M)
    if norm_ptr is not None:
        squares = tl.zeros([BLOCK_M * STEP // 32, 32], tl.float32)
        for step in tl.static_range(STEPS):
            if step < AHEAD:
                part = xs[step].to(tl.float32)
            else:
                part = _load_tokens(x_ptrs + step * STEP, token, x_column, num_tokens, K - step * STEP).to(tl.float32)
            squares += part * part
        squares = tl.sum(tl.sum(_unfold(squares, BLOCK_M, SPLIT), axis=0), axis=3)  # [BLOCK_M / 8, SPLIT, 8]
        squares = _add_parts(tl.permute(squares, [1, 0, 2]))
        scale = inverse_rms(squares, eps, K)[None, :, None, :, None]
    acc = tl.zeros([SPLIT, ROWS, BLOCK_M], tl.float32)
    for step in tl.static_range(STEPS):
        x = _unfold(xs[step], BLOCK_M, SPLIT)
        if norm_ptr is not None:
            x = scale_and_weigh(x, scale, _unfold(norms[step], 8, SPLIT))
        weight = _as_operand(_unfold(weights[step], ROWS, SPLIT))
        acc = tl.dot(weight, tl.trans(_as_operand(x), 0, 2, 1), acc, input_precision="ieee")
        if step + AHEAD < STEPS:
            start = (step + AHEAD) * STEP
            mask = row_exists & (column < K - start)
            weights = weights + (load_weight(weight_ptrs + start, mask, WHOLE_K and N % BLOCK_N == 0),)
            xs = xs + (_load_tokens(x_ptrs + start, token, x_column, num_tokens, K - start),)
            if norm_ptr is not None:
                norms = norms + (load_whole(norm_ptr + start + norm_column, norm_column < K - start, WHOLE_K),)
    _store_outputs(
        acc, bias, up_bias, residual, out_ptr, first_row, num_tokens, out_stride, N,
        BLOCK_N, BLOCK_M, SPLIT, GATED, ACTIVATION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _looped_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    num_tokens,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr,
    STATISTICS_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Any K, in steps of SPLIT * BLOCK_K through shared memory. Its loads of the weight come after the wait."""
    if PDL:
        launch_dependents()
    ROWS: tl.constexpr = BLOCK_N * (2 if GATED else 1)
    STEP: tl.constexpr = SPLIT * BLOCK_K
    WHOLE_K: tl.constexpr = K % STEP == 0
    first_row = tl.program_id(0) * BLOCK_N
    row, row_exists, column, x_column, token = _axes(first_row, N, ROWS, BLOCK_N, BLOCK_K, BLOCK_M, SPLIT)
    weight_ptrs = weight_ptr + row * K + column
    x_ptrs = x_ptr + token.to(tl.int64) * x_stride + x_column
    bias, up_bias, residual = None, None, None
    if bias_ptr is not None:
        bias = _load_bias(bias_ptr, first_row, N, BLOCK_N)
        if GATED:
            up_bias = _load_bias(bias_ptr + N, first_row, N, BLOCK_N)
    if PDL:
        wait_for_previous()

    if residual_ptr is not None:
        residual = _load_residual(residual_ptr, first_row, num_tokens, residual_stride, N, BLOCK_N, BLOCK_M)
    if norm_ptr is not None:
        row_token, k = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, STATISTICS_K)[None, :]
        squares = tl.zeros([BLOCK_M], tl.float32)
        for start in tl.range(0, K, STATISTICS_K, num_stages=STAGES):
            in_row = (row_token < num_tokens) & (k < K - start)
            part = tl.load(x_ptr + row_token.to(tl.int64) * x_stride + start + k, mask=in_row, other=0.0)
            squares += tl.sum(part.to(tl.float32) * part.to(tl.float32), axis=1)
        scale = tl.reshape(inverse_rms(squares, eps, K), token.shape)
    if SPLIT == 1:
        acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([SPLIT, ROWS, BLOCK_M], tl.float32)
    for start in tl.range(0, K, STEP):
        mask = row_exists & (column < K - start)
        weight = load_weight(weight_ptrs + start, mask, WHOLE_K and N % BLOCK_N == 0)
        x = tl.load(x_ptrs + start, mask=(token < num_tokens) & (x_column < K - start), other=0.0)
        if norm_ptr is not None:
            x = scale_and_weigh(x, scale, load_whole(norm_ptr + start + x_column, x_column < K - start, WHOLE_K))
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    _store_outputs(
        acc, bias, up_bias, residual, out_ptr, first_row, num_tokens, out_stride, N,
        BLOCK_N, BLOCK_M, SPLIT, GATED, ACTIVATION,
    )  # fmt: skip
