"""The form of `skinny_linear` for one token: plain multiply-adds, each program with all its loads in flight at once."""

# A jitted body is Triton, where a tuple may grow:
# mypy: disable-error-code="assignment,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from tritonllm.kernels.activation import activate
from tritonllm.kernels.dependent_launch import launch_dependents, wait_for_previous
from tritonllm.kernels.norm import inverse_rms, scale_and_weigh


@triton.jit
def load_whole(pointers, mask, WHOLE: tl.constexpr):
    """Load with a mask only where a tile can overrun; masked elements are 0."""
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_weight(pointers, mask, WHOLE: tl.constexpr):
    """`load_whole` for what no program reads again before the next token."""
    if WHOLE:
        return tl.load(pointers, eviction_policy="evict_first")
    else:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def finish(product, up, bias, up_bias, residual, DTYPE: tl.constexpr, GATED: tl.constexpr,
           ACTIVATION: tl.constexpr):  # fmt: skip
    """fp32 sums to outputs, with the roundings of the separate ops; bias and residual may be None."""
    if bias is not None:
        product += bias.to(tl.float32)
    y = product.to(DTYPE)
    if GATED:
        if bias is not None:
            up += up_bias.to(tl.float32)
        activated = activate(y.to(tl.float32), ACTIVATION).to(DTYPE).to(tl.float32)
        y = (activated * up.to(DTYPE).to(tl.float32)).to(DTYPE)
    if residual is not None:
        y = (y.to(tl.float32) + residual.to(tl.float32)).to(DTYPE)
    return y


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    X_ROWS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    WHOLE_K: tl.constexpr = K % BLOCK_K == 0
    WHOLE: tl.constexpr = WHOLE_K and N % (BLOCK_N * TILES) == 0
    # Rows of one warp are neighbours.
    first_row = tl.program_id(0) * (BLOCK_N * TILES) + tl.arange(0, BLOCK_N)[:, None] * TILES  # [BLOCK_N, 1]
    column = tl.arange(0, BLOCK_K)[None, :]  # [1, BLOCK_K]
    # What there is once a row stands in the first of 32 cells. Tiles of this shape keep a row in the warp that sums it,
    # those of shape [BLOCK_N, 1] would be gathered in one warp, through shared memory.
    cell = tl.arange(0, 32)[None, :]  # [1, 32]
    # x has as many equal rows as warps own rows of W: then its tile has the layout of W's and changes no threads.
    x_column = tl.arange(0, X_ROWS)[:, None] * 0 + column  # [X_ROWS, BLOCK_K]

    weights, up_weights, norms, biases, up_biases = (), (), (), (), ()
    for tile in tl.static_range(TILES):
        row = first_row + tile
        row_ptrs = weight_ptr + row.to(tl.int64) * K + column
        for step in tl.static_range(STEPS):
            mask = (row < N) & (column < K - step * BLOCK_K)
            weights = weights + (load_weight(row_ptrs + step * BLOCK_K, mask, WHOLE),)
            if GATED:
                up_ptrs = row_ptrs + tl.full([1, 1], N, tl.int64) * K + step * BLOCK_K
                up_weights = up_weights + (load_weight(up_ptrs, mask, WHOLE),)
        if bias_ptr is not None:
            live = (row < N) & (cell == 0)
            biases = biases + (tl.load(bias_ptr + row + cell, mask=live, other=0.0),)
            if GATED:
                up_biases = up_biases + (tl.load(bias_ptr + N + row + cell, mask=live, other=0.0),)
    if norm_ptr is not None:
        for step in tl.static_range(STEPS):
            mask = x_column < K - step * BLOCK_K
            norms = norms + (load_whole(norm_ptr + step * BLOCK_K + x_column, mask, WHOLE_K),)
    if PDL:
        wait_for_previous()

    xs, residuals = (), ()
    for step in tl.static_range(STEPS):
        xs = xs + (load_whole(x_ptr + step * BLOCK_K + x_column, x_column < K - step * BLOCK_K, WHOLE_K),)
    if residual_ptr is not None:
        for tile in tl.static_range(TILES):
            row = first_row + tile
            live = (row < N) & (cell == 0)
            residuals = residuals + (tl.load(residual_ptr + row + cell, mask=live, other=0.0),)
    if norm_ptr is not None:
        squares = tl.zeros([X_ROWS, BLOCK_K], tl.float32)
        for step in tl.static_range(STEPS):
            squares += xs[step].to(tl.float32) * xs[step].to(tl.float32)
        scale = inverse_rms(tl.sum(squares, axis=1, keep_dims=True), eps, K)  # [X_ROWS, 1]
        normed = ()
        for step in tl.static_range(STEPS):
            normed = normed + (scale_and_weigh(xs[step], scale, norms[step]),)
        xs = normed

    for tile in tl.static_range(TILES):
        row = first_row + tile
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for step in tl.static_range(STEPS):
            x = xs[step].to(tl.float32)
            acc += weights[tile * STEPS + step].to(tl.float32) * x
            if GATED:
                up_acc += up_weights[tile * STEPS + step].to(tl.float32) * x
        up, bias, up_bias, residual = None, None, None, None
        product = tl.broadcast_to(tl.sum(acc, axis=1, keep_dims=True), [BLOCK_N, 32])
        if GATED:
            up = tl.broadcast_to(tl.sum(up_acc, axis=1, keep_dims=True), [BLOCK_N, 32])
        if bias_ptr is not None:
            bias = biases[tile]
            if GATED:
                up_bias = up_biases[tile]
        if residual_ptr is not None:
            residual = residuals[tile]
        y = finish(product, up, bias, up_bias, residual, out_ptr.dtype.element_ty, GATED, ACTIVATION)
        tl.store(out_ptr + row + cell, y, mask=(row < N) & (cell == 0))
