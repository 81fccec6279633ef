"""Linear layers of a decode step on Hopper, for any number of rows; the tuning table says where they are the fastest.

    hopper_linear        y = x W^T + b;  gated: W stacks gate and up rows, y = act(gate) * up
    hopper_linear_parts  parts [S, M, N], whose sum over S is x W^T + b

Layouts: x [M, K], W [N, K] ([2 N, K] if gated), b one element a row of W, y [M, N].

A layer of this size is hardly longer than the time between two kernels. So its programs start while the kernel before
it still runs (programmatic dependent launch), load what they need of W, and only then wait for x. A weight of few rows
has too few tiles to be loaded quickly: its sum over K is divided among programs, and whoever reads the parts adds them,
always in the same order. `add_rms_norm` does so on its way.

Rounding follows Hugging Face's separate ops, as in `skinny_linear`: sums are fp32 and rounded after the bias, act is
fp32 and rounded, and so is its product with up. Parts are fp32 and not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tritonllm.kernels.activation import check_activation
from tritonllm.kernels.hopper_linear_kernel import _hopper_linear_kernel
from tritonllm.kernels.launch import Launch, cdiv, check, nvidia_capability, on_gpu, shape_of
from tritonllm.kernels.reference import linear

_DTYPES = (torch.bfloat16, torch.float16)
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_COLUMNS = 64  # of a step: 128 bytes, the widest swizzle
_SMALLEST_BOX = 8  # rows: what a swizzle of 128 bytes repeats after
_PROGRAMS = 132  # SMs of an H100 or H200
_SHARED_MEMORY = 220 << 10  # bytes of an SM for tiles; barriers and the system take the rest of 228 KiB


@dataclass(frozen=True)
class HopperTile:
    """How the work is cut up. All choices but `splits` give the same bits.

    Attributes:
        tokens: rows of x a program takes, 64 or 128.
        rows: outputs a program computes, a power of two from 8 to 128; a gated one reads twice as many rows of W.
        stages: steps of 64 columns in flight.
        splits: programs that share a sum.
    """

    tokens: int
    rows: int
    stages: int
    splits: int = 1


@cache
def choose_tile(tokens: int, rows: int, gated: bool, parts: bool) -> HopperTile:
    """The choice for `rows` outputs of `tokens` rows.

    Found on one H200 in whole layers of Qwen3-0.6B, Llama-3.2-1B and Qwen3-8B, which `python -m
    tritonllm.bench.decode_layer` measures. Programs that share a tile of x or W read it again, so there is hardly more
    than one for each SM; but of many small programs the next kernel's can start before the last has ended. So tiles are
    64 by 64 as long as they leave room to divide sums among programs, or all run at once, two on an SM. Wider ones are
    for wider weights. Up to 64 tokens a gated layer reads W in half the rows, if those still run at once. A program
    alone on its SM loads as far ahead as fits.
    """
    most = _PROGRAMS // 2 if parts else 2 * _PROGRAMS
    token_tile = 64 if tokens <= 64 or cdiv(tokens, 64) * cdiv(rows, 64) <= most else 128
    if parts and token_tile == 128 and cdiv(tokens, 64) % 2 and cdiv(tokens, 64) * cdiv(rows, 128) <= most:
        token_tile = 64  # by 128 rows: a tile less of tokens that others compute as well
    token_tiles = cdiv(tokens, token_tile)
    halves = 2 if gated else 1
    row_tile = 32 if gated and tokens <= 64 and cdiv(rows, 32) <= most else 64
    if parts and cdiv(rows, row_tile) * token_tiles > most:
        row_tile = 128  # or no sum could be divided
    tiles = cdiv(rows, row_tile) * token_tiles
    splits = min(4, 1 << max(_PROGRAMS // tiles, 1).bit_length() - 1) if parts else 1
    shared_memory = _SHARED_MEMORY if tiles * splits <= _PROGRAMS else _SHARED_MEMORY // 2
    stage = (token_tile + halves * row_tile) * _COLUMNS * 2
    return HopperTile(token_tile, row_tile, min(shared_memory // stage, 12), splits)


def token_boxes(tokens: int, token_tile: int) -> tuple[int, int]:
    """Rows of a box of x, and how many boxes fill a tile: such that next to none reaches beyond the last token.

    A tile has one box if there are so many tokens, else two that overlap; places behind them are not filled.
    """
    if tokens >= token_tile:
        return token_tile, 1
    if tokens <= _SMALLEST_BOX:
        return _SMALLEST_BOX, 1
    return 1 << (tokens - 1).bit_length() - 1, 2


def serves_shape(in_features: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is such a kernel: Hopper, two-byte floats, and rows that TMA can step."""
    return nvidia_capability(device)[0] == 9 and dtype in _DTYPES and in_features % 8 == 0


def plan_hopper_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
    tile: HopperTile | None = None,
    pdl: bool = True,
) -> Launch:
    """Plan of `hopper_linear` into out [M, N], or of `hopper_linear_parts` into a float32 out [S, M, N].

    `tile` defaults to `choose_tile`; its splits must be S.
    """
    op = "hopper_linear"
    check(
        x.dim() == 2 and x.dtype in _DTYPES and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.shape[1] % 8 == 0,
        op,
        lambda: f"x must be bfloat16 or float16 [M, K], rows at multiples of 16 bytes, not {shape_of(x)}",
    )
    tokens, columns = x.shape
    check(
        weight.dim() == 2 and weight.shape[1] == columns and weight.dtype == x.dtype and weight.is_contiguous(),
        op,
        lambda: f"weight must be contiguous [N, {columns}] of the dtype of x {shape_of(x)}, not {shape_of(weight)}",
    )
    check_activation(op, activation)
    parts = out.dim() == 3
    rows = out.shape[-1]
    check(
        out.shape[-2:] == (tokens, weight.shape[0] // (2 if gated else 1))
        and out.dtype == (torch.float32 if parts else x.dtype)
        and out.stride(-1) == 1
        and not (parts and gated)
        and weight.shape[0] == rows * (2 if gated else 1),
        op,
        lambda: f"out does not fit x {shape_of(x)} and weight {shape_of(weight)}, gated {gated}: {shape_of(out)}",
    )
    check(
        bias is None or (bias.shape == weight.shape[:1] and bias.dtype == x.dtype and bias.is_contiguous()),
        op,
        "bias must be contiguous, of the dtype of x, an element for each row of the weight",
    )
    tile = tile or choose_tile(tokens, rows, gated, parts)
    check(tile.splits == (out.shape[0] if parts else 1), op, lambda: f"{tile} does not fit out {shape_of(out)}")
    steps = cdiv(columns, tile.splits * _COLUMNS)
    warps = tile.tokens // 16
    box, boxes = token_boxes(tokens, tile.tokens)
    return Launch(
        kernel=_hopper_linear_kernel,
        grid=(cdiv(tokens, tile.tokens), cdiv(rows, tile.rows), tile.splits),
        args={
            "x_desc": TensorDescriptor(x, [tokens, columns], [x.stride(0), 1], [box, _COLUMNS], _LAYOUT),
            "weight_desc": TensorDescriptor(weight, list(weight.shape), [columns, 1], [tile.rows, _COLUMNS], _LAYOUT),
            "bias_ptr": bias,
            "out_ptr": out,
            "num_tokens": tokens,
            "out_part_stride": out.stride(0) if parts else 0,
            "out_stride": out.stride(-2),
        },
        constexprs={
            "N": rows,
            "K": columns,
            "BLOCK_M": tile.tokens,
            "BLOCK_N": tile.rows,
            "BLOCK_K": _COLUMNS,
            "BOX_M": box,
            "BOXES": boxes,
            "STAGES": min(tile.stages, steps),
            "SPLITS": tile.splits,
            "GATED": gated,
            "ACTIVATION": activation,
            "WARPS": warps,
            "PDL": pdl,
        },
        options={"num_warps": warps, "launch_pdl": True} if pdl else {"num_warps": warps},
    )


def hopper_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
) -> torch.Tensor:
    """A linear layer, with activation and product where it is gated.

    Weight and bias are read before the previous kernel on the stream has ended: that kernel must not have written them.

    Args:
        x: [M, K] bfloat16 or float16, K a multiple of 8; rows may be strided by multiples of 8.
        weight: [N, K], contiguous; gated: [2 N, K], rows of the gate and then those of up.
        bias: one element a row of weight.
        gated: the result is act(gate) * up.
        activation: act, one of `activation.ACTIVATIONS`; without effect where it is not gated.

    Returns:
        [M, N], new, contiguous, in the dtype of x.

    Raises:
        KernelError: shapes, dtypes or strides do not fit, or the GPU is not of the Hopper family.
    """
    if not on_gpu(x):
        return linear.hopper_linear(x, weight, bias=bias, gated=gated, activation=activation)
    _require_hopper(x.device)
    out = torch.empty(x.shape[0], weight.shape[0] // (2 if gated else 1), dtype=x.dtype, device=x.device)
    plan_hopper_linear(x, weight, out, bias=bias, gated=gated, activation=activation).run()
    return out


def hopper_linear_parts(x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer in parts, for `add_rms_norm` to add up; arguments and errors as in `hopper_linear`.

    Returns:
        float32 [S, M, N], new, contiguous; S depends on M and N alone.
    """
    if not on_gpu(x):
        return linear.hopper_linear_parts(x, weight, bias=bias)
    _require_hopper(x.device)
    rows = weight.shape[0]
    splits = choose_tile(x.shape[0], rows, gated=False, parts=True).splits
    out = torch.empty(splits, x.shape[0], rows, dtype=torch.float32, device=x.device)
    plan_hopper_linear(x, weight, out, bias=bias).run()
    return out


def _require_hopper(device: torch.device) -> None:
    capability = nvidia_capability(device)
    check(capability[0] == 9, "hopper_linear", lambda: f"it runs on compute capability 9.x alone, not {capability}")
