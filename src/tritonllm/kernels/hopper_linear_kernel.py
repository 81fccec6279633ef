"""The kernel of `hopper_linear`: tiles of x and of the weight come by TMA, wgmma multiplies them.

Written in Gluon, which is part of Triton and lays out memory and barriers by hand: what it is for, loading the weight
while the kernel that computes x still runs, cannot be said in plain Triton. It has no interpreter, so this form is
compared with the reference on a GPU only.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonllm.kernels.dependent_launch import launch_dependents, wait_for_previous
from tritonllm.kernels.gluon_adapter import load_async, reinterpret


@gluon.jit
def _load_weight(weight_desc, weight_smem, ready, step, first_row, first_column, up_row,
                 BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, BYTES: gl.constexpr):  # fmt: skip
    """Announce all that comes with a step, and start on its part of the weight."""
    stage = step % STAGES
    column = first_column + step * BLOCK_K
    mbarrier.expect(ready.index(stage), BYTES)
    if GATED:
        load_async(weight_desc, [first_row, column], ready.index(stage), weight_smem.index(2 * stage))
        load_async(weight_desc, [up_row, column], ready.index(stage), weight_smem.index(2 * stage + 1))
    else:
        load_async(weight_desc, [first_row, column], ready.index(stage), weight_smem.index(stage))


@gluon.jit
def _load_x(x_desc, x_boxes, ready, step, first_token, second_token, first_column,
            BLOCK_K: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr, PLACES: gl.constexpr):  # fmt: skip
    """Start on a step's part of x: one box of tokens, or a second one that may overlap it."""
    stage = step % STAGES
    column = first_column + step * BLOCK_K
    load_async(x_desc, [first_token, column], ready.index(stage), x_boxes.index(stage * PLACES))
    if BOXES == 2:
        load_async(x_desc, [second_token, column], ready.index(stage), x_boxes.index(stage * PLACES + 1))


@gluon.jit
def _bias_of(bias_ptr, row, split, N: gl.constexpr):
    """Biases of a tile's rows, [1, rows]; of several parts only the first has them."""
    return gl.expand_dims(gl.load(bias_ptr + row, mask=(row < N) & (split == 0), other=0.0).to(gl.float32), 0)


@gluon.jit
def _activate(x, ACTIVATION: gl.constexpr):
    """As `activation.activate`."""
    if ACTIVATION == "silu":
        return x / (1.0 + gl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    else:
        return x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@gluon.jit(do_not_specialize=["num_tokens"])
def _hopper_linear_kernel(
    x_desc,
    weight_desc,
    bias_ptr,
    out_ptr,
    num_tokens,
    out_part_stride,
    out_stride,
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BOX_M: gl.constexpr,
    BOXES: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        launch_dependents()
    HALVES: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = (BOXES * BOX_M + HALVES * BLOCK_N) * BLOCK_K * 2
    PLACES: gl.constexpr = BLOCK_M // BOX_M  # for boxes, in a stage
    STEPS: gl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)  # of each split; behind K all is zero
    FIRST: gl.constexpr = min(STEPS, STAGES)
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    DTYPE: gl.constexpr = weight_desc.dtype
    # Programs that share a tile of the weight are neighbours, so that it comes from memory once.
    # Boxes of x are moved back to where it ends: TMA takes longer for rows that are not there than for those that are.
    # Of tokens that are computed twice both results are the same, to the bit.
    first_token = gl.maximum(gl.minimum(gl.program_id(0) * BLOCK_M, num_tokens - BLOCK_M), 0)
    second_token = num_tokens - BOX_M  # of a second box, which there is where a tile has room for more than x has
    first_row = gl.program_id(1) * BLOCK_N
    split = gl.program_id(2)
    first_column = split * (STEPS * BLOCK_K)

    x_boxes = gl.allocate_shared_memory(DTYPE, [STAGES * PLACES, BOX_M, BLOCK_K], x_desc.layout)
    x_smem = reinterpret(x_boxes, DTYPE, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    weight_smem = gl.allocate_shared_memory(DTYPE, [HALVES * STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(FIRST):
        _load_weight(
            weight_desc, weight_smem, ready, i, first_row, first_column, N + first_row, BLOCK_K, STAGES, GATED, BYTES
        )  # fmt: skip
    if PDL:
        wait_for_previous()
    for i in gl.static_range(FIRST):
        _load_x(
            x_desc, x_boxes, ready, i, first_token, second_token, first_column, BLOCK_K, STAGES, BOXES, PLACES
        )  # fmt: skip

    acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PRODUCTS)
    up = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PRODUCTS)  # of a gated layer, where acc is the gate
    for step in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        x = x_smem.index(stage)
        if GATED:
            acc = warpgroup_mma(x, weight_smem.index(2 * stage).permute((1, 0)), acc, is_async=True)
            up = warpgroup_mma(x, weight_smem.index(2 * stage + 1).permute((1, 0)), up, is_async=True)
            acc, up = warpgroup_mma_wait(2, deps=[acc, up])
        else:
            acc = warpgroup_mma(x, weight_smem.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
        # The step before is done with its stage.
        if STEPS > STAGES:
            refill = step - 1 + STAGES
            if (step > 0) & (refill < STEPS):
                _load_weight(
                    weight_desc, weight_smem, ready, refill, first_row, first_column, N + first_row,
                    BLOCK_K, STAGES, GATED, BYTES,
                )  # fmt: skip
                _load_x(
                    x_desc, x_boxes, ready, refill, first_token, second_token, first_column,
                    BLOCK_K, STAGES, BOXES, PLACES,
                )  # fmt: skip
    if GATED:
        acc, up = warpgroup_mma_wait(0, deps=[acc, up])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])

    row = first_row + gl.arange(0, BLOCK_N, gl.SliceLayout(0, PRODUCTS))
    place = gl.arange(0, BLOCK_M, gl.SliceLayout(1, PRODUCTS))
    token = first_token + place
    if BOXES == 2:
        token = gl.where(place < BOX_M, token, second_token - BOX_M + place)
    mask = gl.expand_dims(token < num_tokens, 1) & gl.expand_dims(row < N, 0)  # no token for places behind the boxes
    offsets = gl.expand_dims(token.to(gl.int64) * out_stride, 1) + gl.expand_dims(row, 0)
    out_ptr += split.to(gl.int64) * out_part_stride
    if bias_ptr is not None:
        acc += _bias_of(bias_ptr, row, split, N)
        if GATED:
            up += _bias_of(bias_ptr + N, row, split, N)
    if GATED:
        gate = acc.to(DTYPE).to(gl.float32)
        activated = _activate(gate, ACTIVATION).to(DTYPE).to(gl.float32)
        acc = activated * up.to(DTYPE).to(gl.float32)
    gl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)
