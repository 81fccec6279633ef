"""The ops: Triton kernels on a GPU and in Triton's interpreter, their PyTorch references on a CPU.

    from tritonllm import kernels

    y = kernels.rms_norm(x, weight, 1e-6)

Every op is here with what its caller needs: `DecodeWorkspace`, `PrefillTiling` and `prefill_tiles`, the columns of
decode rows in `row_layout`, and the error that refuses wrong tensors. `reference` has the same ops in plain PyTorch.
`docs/kernels.md` describes each op: shapes, rounding, targets. Nothing here knows the engine. Importing this package
imports neither torch nor triton; the first use of a name does.

Plans stay in their modules (`from tritonllm.kernels.norm import plan_rms_norm`). They take outputs, tiles and limits of
a device, so they change with how an op is computed, which its signature does not.

`kernels.decode_attention` is the op, always. Its module has the same name and is where
`from tritonllm.kernels.decode_attention import ...` looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritonllm.kernels import reference, row_layout
from tritonllm.lazy_package import make_lazy

if TYPE_CHECKING:
    from tritonllm.errors import KernelError
    from tritonllm.kernels.activation import gelu_and_mul, silu_and_mul
    from tritonllm.kernels.decode_attention import DecodeWorkspace, decode_attention
    from tritonllm.kernels.decode_rows import advance_rows, load_rows
    from tritonllm.kernels.fused_decode_attention import fused_decode_attention
    from tritonllm.kernels.hopper_linear import hopper_linear, hopper_linear_parts
    from tritonllm.kernels.kept_set import kept_threshold
    from tritonllm.kernels.kv_store import store_kv
    from tritonllm.kernels.launch import Launch
    from tritonllm.kernels.logit_controls import adjust_logits
    from tritonllm.kernels.logprobs import token_logprobs
    from tritonllm.kernels.longest_first import longest_first
    from tritonllm.kernels.norm import add_rms_norm, rms_norm
    from tritonllm.kernels.prefill_attention import prefill_attention
    from tritonllm.kernels.prefill_tiling import PrefillTiling, prefill_tiles
    from tritonllm.kernels.rope import apply_rope
    from tritonllm.kernels.rope_store import rope_store_kv
    from tritonllm.kernels.sampling import merge_picks, pick_from_shard, pick_tokens, sample_tokens
    from tritonllm.kernels.skinny_linear import skinny_linear

_HOME = {
    "DecodeWorkspace": "tritonllm.kernels.decode_attention",
    "KernelError": "tritonllm.errors",
    "Launch": "tritonllm.kernels.launch",
    "PrefillTiling": "tritonllm.kernels.prefill_tiling",
    "add_rms_norm": "tritonllm.kernels.norm",
    "adjust_logits": "tritonllm.kernels.logit_controls",
    "advance_rows": "tritonllm.kernels.decode_rows",
    "apply_rope": "tritonllm.kernels.rope",
    "decode_attention": "tritonllm.kernels.decode_attention",
    "fused_decode_attention": "tritonllm.kernels.fused_decode_attention",
    "gelu_and_mul": "tritonllm.kernels.activation",
    "hopper_linear": "tritonllm.kernels.hopper_linear",
    "hopper_linear_parts": "tritonllm.kernels.hopper_linear",
    "kept_threshold": "tritonllm.kernels.kept_set",
    "load_rows": "tritonllm.kernels.decode_rows",
    "longest_first": "tritonllm.kernels.longest_first",
    "merge_picks": "tritonllm.kernels.sampling",
    "pick_from_shard": "tritonllm.kernels.sampling",
    "pick_tokens": "tritonllm.kernels.sampling",
    "prefill_attention": "tritonllm.kernels.prefill_attention",
    "prefill_tiles": "tritonllm.kernels.prefill_tiling",
    "rms_norm": "tritonllm.kernels.norm",
    "rope_store_kv": "tritonllm.kernels.rope_store",
    "sample_tokens": "tritonllm.kernels.sampling",
    "silu_and_mul": "tritonllm.kernels.activation",
    "skinny_linear": "tritonllm.kernels.skinny_linear",
    "store_kv": "tritonllm.kernels.kv_store",
    "token_logprobs": "tritonllm.kernels.logprobs",
}

__all__ = [
    "DecodeWorkspace",
    "KernelError",
    "Launch",
    "PrefillTiling",
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
    "prefill_tiles",
    "reference",
    "rms_norm",
    "rope_store_kv",
    "row_layout",
    "sample_tokens",
    "silu_and_mul",
    "skinny_linear",
    "store_kv",
    "token_logprobs",
]

make_lazy(__name__, _HOME)
