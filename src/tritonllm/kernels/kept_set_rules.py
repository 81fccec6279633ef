"""What decides about a token in `kept_set.py`: its filters, its key, its mass. All passes share these."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonllm.kernels.noise import MIN_TEMPERATURE
from tritonllm.kernels.reference import sampling as reference

_LOG2_E = tl.constexpr(1.4426950408889634)
MASS_SCALE = tl.constexpr(reference.MASS_SCALE)

LISTED_AT_ONCE_16 = tl.constexpr(2048)
LISTED_AT_ONCE_32 = tl.constexpr(512)
"""Listed tokens of 16 and of 32 bits that are read at a time. On an H200 one row of 151,936 takes 14.3 us with that and
15.1 with 512 of 16 bits, 28.5 and 29.8 where all is flat; with 2,048 of 32 bits 15.8 and 15.1."""


@triton.jit
def row_filters(
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    temperatures_stride,
    top_ks_stride,
    top_ps_stride,
    min_ps_stride,
    row,
    vocab_size,
):
    """Temperature, top-k (0: off), top-p, min-p (0: off) of a row, and whether it has a threshold to search for."""
    temperature = tl.load(temperatures_ptr + row * temperatures_stride)
    top_k = tl.load(top_ks_ptr + row * top_ks_stride)
    top_k = tl.where(top_k < vocab_size, tl.maximum(top_k, 0), 0)
    top_p = tl.load(top_ps_ptr + row * top_ps_stride)
    min_p = tl.full([], 0.0, tl.float32)
    if min_ps_ptr is not None:
        min_p = tl.load(min_ps_ptr + row * min_ps_stride)
    return temperature, top_k, top_p, min_p, (temperature >= MIN_TEMPERATURE) & ((top_k > 0) | (top_p < 1.0))


@triton.jit
def order_key(x):
    """uint32 keys ordered as x; those of a 16-bit x have 16 bits. Both zeros have one key."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    key = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    return key >> (32 - x.dtype.primitive_bitwidth)


@triton.jit
def logit_of_key(key, DTYPE: tl.constexpr):
    """The inverse of `order_key` for logits of type DTYPE, as fp32."""
    bits = (key << (32 - DTYPE.primitive_bitwidth)).to(tl.int32, bitcast=True)
    bits = bits ^ tl.where(bits < 0, -2147483648, -1)
    if DTYPE.primitive_bitwidth == 16:
        return (bits >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def probability_ratio(x, largest, temperature, HARDWARE: tl.constexpr):
    """How many times as likely as the likeliest token, whose logit is finite; fp32."""
    exponent = (x - largest) * (_LOG2_E / temperature)
    if HARDWARE:
        # Without ".ftz" each argument would be scaled for subnormal results, which have no mass.
        instruction: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(instruction, "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1)
    return tl.exp2(exponent)


@triton.jit
def fixed_point(ratio):
    """Mass int64 of a ratio, or of a sum of ratios."""
    return (ratio * MASS_SCALE).to(tl.int64)


@triton.jit
def share_of(total, top_p):
    """The mass that top-p needs out of the total, int64."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def min_p_cut(largest, temperature, min_p):
    """The logit at which a token is min_p times as likely as the likeliest; -inf for a min_p not above 0."""
    cut = largest + temperature * tl.log(tl.minimum(tl.maximum(min_p, 1e-37), 1.0))
    return tl.where((min_p > 0.0) & (largest > float("-inf")), cut, float("-inf"))
