"""The linear layers of a decode step of many rows, as a Hopper device gets them."""

from __future__ import annotations

from functools import partial

import torch
from harness import Case, meta

from tritonllm.kernels.hopper_linear import choose_tile, plan_hopper_linear
from tritonllm.kernels.launch import Launch


def _linears(tokens: int, hidden: int, qkv: int, attention: int, intermediate: int, bias: bool,
             activation: str = "silu") -> list[Launch]:  # fmt: skip
    """qkv, o in parts, gate and up, down in parts."""

    def whole(columns: int, rows: int, gated: bool = False) -> Launch:
        weight = meta(rows * (2 if gated else 1), columns)
        bias_of = meta(weight.shape[0]) if bias else None
        options = {"gated": gated, "activation": activation}
        return plan_hopper_linear(meta(tokens, columns), weight, meta(tokens, rows), bias=bias_of, **options)

    def parts(columns: int, rows: int) -> Launch:
        splits = choose_tile(tokens, rows, gated=False, parts=True).splits
        out = meta(splits, tokens, rows, dtype=torch.float32)
        return plan_hopper_linear(meta(tokens, columns), meta(rows, columns), out, bias=meta(rows) if bias else None)

    return [
        whole(hidden, qkv),
        parts(attention, hidden),
        whole(hidden, intermediate, gated=True),
        parts(intermediate, hidden),
    ]


_QWEN3 = (1024, 4096, 2048, 3072, False)
_LLAMA = (2048, 3072, 2048, 8192, False)
_SMOLLM = (576, 960, 576, 1536, True)

CASES = [
    Case("qwen3-0.6b-64", partial(_linears, 64, *_QWEN3), dot=True, only=("sm_90",)),
    Case("qwen3-0.6b-5", partial(_linears, 5, *_QWEN3), dot=True, only=("sm_90",)),
    Case("qwen3-0.6b-40", partial(_linears, 40, *_QWEN3), dot=True, only=("sm_90",)),
    Case("qwen3-0.6b-256", partial(_linears, 256, *_QWEN3), dot=True, only=("sm_90",)),
    Case("llama-3.2-1b-64", partial(_linears, 64, *_LLAMA), dot=True, only=("sm_90",)),
    Case("llama-3.2-1b-104", partial(_linears, 104, *_LLAMA), dot=True, only=("sm_90",)),
    Case("smollm2-135m-128-bias", partial(_linears, 128, *_SMOLLM), dot=True, only=("sm_90",)),
    Case("qwen3-0.6b-64-gelu", partial(_linears, 64, *_QWEN3, activation="gelu"), dot=True, only=("sm_90",)),
    Case("qwen3-0.6b-64-gelu-tanh", partial(_linears, 64, *_QWEN3, activation="gelu_tanh"), dot=True, only=("sm_90",)),
]
