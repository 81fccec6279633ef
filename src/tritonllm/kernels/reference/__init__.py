"""The ops in plain PyTorch: what a kernel is tested against, and what runs on a CPU without the interpreter.

Every op of `tritonllm.kernels` is here under its name, with its parameters. Arithmetic is in fp32 with the op's own
roundings, so that a kernel and its reference differ only by the order of a sum. References run on any device, check
nothing, and may look at values on the device.

What only steers a kernel may be left out here: the `workspace` of `decode_attention` and `fused_decode_attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritonllm.lazy_package import make_lazy

if TYPE_CHECKING:
    from tritonllm.kernels.reference.attention import decode_attention, fused_decode_attention, prefill_attention
    from tritonllm.kernels.reference.elementwise import (
        add_rms_norm,
        advance_rows,
        apply_rope,
        gelu_and_mul,
        load_rows,
        longest_first,
        rms_norm,
        rope_store_kv,
        silu_and_mul,
        store_kv,
    )
    from tritonllm.kernels.reference.linear import hopper_linear, hopper_linear_parts, skinny_linear
    from tritonllm.kernels.reference.logits import adjust_logits, token_logprobs
    from tritonllm.kernels.reference.sampling import (
        kept_threshold,
        merge_picks,
        pick_from_shard,
        pick_tokens,
        sample_tokens,
    )

_HOME = {
    "add_rms_norm": "tritonllm.kernels.reference.elementwise",
    "adjust_logits": "tritonllm.kernels.reference.logits",
    "advance_rows": "tritonllm.kernels.reference.elementwise",
    "apply_rope": "tritonllm.kernels.reference.elementwise",
    "decode_attention": "tritonllm.kernels.reference.attention",
    "fused_decode_attention": "tritonllm.kernels.reference.attention",
    "gelu_and_mul": "tritonllm.kernels.reference.elementwise",
    "hopper_linear": "tritonllm.kernels.reference.linear",
    "hopper_linear_parts": "tritonllm.kernels.reference.linear",
    "kept_threshold": "tritonllm.kernels.reference.sampling",
    "load_rows": "tritonllm.kernels.reference.elementwise",
    "longest_first": "tritonllm.kernels.reference.elementwise",
    "merge_picks": "tritonllm.kernels.reference.sampling",
    "pick_from_shard": "tritonllm.kernels.reference.sampling",
    "pick_tokens": "tritonllm.kernels.reference.sampling",
    "prefill_attention": "tritonllm.kernels.reference.attention",
    "rms_norm": "tritonllm.kernels.reference.elementwise",
    "rope_store_kv": "tritonllm.kernels.reference.elementwise",
    "sample_tokens": "tritonllm.kernels.reference.sampling",
    "silu_and_mul": "tritonllm.kernels.reference.elementwise",
    "skinny_linear": "tritonllm.kernels.reference.linear",
    "store_kv": "tritonllm.kernels.reference.elementwise",
    "token_logprobs": "tritonllm.kernels.reference.logits",
}

__all__ = [
    "add_rms_norm",
    "adjust_logits",
    "advance_rows",
    "apply_rope",
    "decode_attention",
    "fused_decode_attention",
    "gelu_and_mul",
    "hopper_linear",
    "hopper_linear_parts",
    "kept_threshold",
    "load_rows",
    "longest_first",
    "merge_picks",
    "pick_from_shard",
    "pick_tokens",
    "prefill_attention",
    "rms_norm",
    "rope_store_kv",
    "sample_tokens",
    "silu_and_mul",
    "skinny_linear",
    "store_kv",
    "token_logprobs",
]

make_lazy(__name__, _HOME)
