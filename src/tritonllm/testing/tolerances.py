"""How far a kernel may be from its reference: one table, elementwise, each bound with its reason.

A bound is stated in units in the last place (ULP) of the output type: a relative part for the value itself, and an
absolute part for values that come from a difference of terms of about 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bound:
    """Bounds in ULP: `relative` and `absolute` for 16-bit outputs, the `_fp32` ones where nothing is rounded to 16."""

    relative: float
    absolute: float
    relative_fp32: float
    absolute_fp32: float
    reason: str


BOUNDS = {
    "rms_norm": Bound(
        3, 0, 16, 0, "a sum of squares in another order may flip the first rounding, the weight then doubles that ULP"
    ),
    "add_rms_norm": Bound(3, 0, 16, 0, "as rms_norm; the sum itself is compared bit for bit"),
    "silu_and_mul": Bound(
        3, 0, 96, 0, "exp(x) on a GPU is 2^(x log2 e), whose rounded argument costs up to |x| <= 88 half ULP in fp32"
    ),
    "gelu_and_mul": Bound(
        3, 1, 256, 16, "1 + erf of a negative gate is a small difference; of tanh as silu, whose argument is a cubic"
    ),
    "apply_rope": Bound(1, 1, 4, 8, "a difference of products, fused into a multiply-add in the kernel alone"),
    "rope_store_kv": Bound(4, 8, 32, 32, "a norm (3 ULP) of values up to about 4, then a rotation that may cancel"),
    "prefill_attention": Bound(4, 4, 64, 64, "probabilities are rounded to the operand type before the second product"),
    "decode_attention": Bound(4, 4, 64, 64, "as prefill_attention; partial results are merged in fp32"),
    "skinny_linear": Bound(
        4, 8, 64, 64, "a sum over K in another order, of products of about 1 in total, rounded up to four times"
    ),
    "hopper_linear": Bound(4, 8, 64, 64, "as skinny_linear"),
}
"""By the name of the op. Of `fused_decode_attention` the output has the bound of `decode_attention`, and the keys
have that of `rope_store_kv`. What other ops give is compared bit for bit."""


def tolerance(op: str, dtype: torch.dtype) -> dict[str, float]:
    """Keyword arguments for `torch.testing.assert_close`: atol and rtol of an op with outputs of this type.

    Raises:
        ValueError: the table has no such op.
    """
    if op not in BOUNDS:
        raise ValueError(f"there is no bound for {op!r}, only for {', '.join(BOUNDS)}; other ops give the same bits")
    bound = BOUNDS[op]
    ulp = torch.finfo(dtype).eps
    if dtype == torch.float32:
        return {"rtol": bound.relative_fp32 * ulp, "atol": bound.absolute_fp32 * ulp}
    return {"rtol": bound.relative * ulp, "atol": bound.absolute * ulp}
