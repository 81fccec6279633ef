"""The linear layers of a decode step at the shapes of shipped models: one token, and both buckets of more."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from harness import Case, meta

from tritonllm.kernels.launch import Launch
from tritonllm.kernels.skinny_linear import plan_skinny_linear
from tritonllm.kernels.tuning_table import UNTUNED, Tuning

_EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """What a checkpoint says about its linear layers; `qkv` and `attention` are rows and columns of the projections."""

    hidden: int
    qkv: int
    attention: int
    intermediate: int
    vocab: int
    qkv_bias: bool = False


MODELS = {
    "qwen3-0.6b": Sizes(1024, 4096, 2048, 3072, 151936),
    "llama-3.2-1b": Sizes(2048, 3072, 2048, 8192, 128256),
    "qwen3-8b": Sizes(4096, 6144, 4096, 12288, 151936),
    "smollm2-135m": Sizes(576, 960, 576, 1536, 49152),
    "qwen2.5-0.5b": Sizes(896, 1152, 896, 4864, 151936, qkv_bias=True),
}


def linears(
    sizes: Sizes,
    tokens: int,
    shared_memory: int = 64 * 1024,
    pdl: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    tuning: Tuning = UNTUNED,
    activation: str = "silu",
) -> list[Launch]:
    """norm + qkv, o + residual, norm + gate and up, down + residual, LM head."""

    def plan(
        columns: int, rows: int, *, norm: bool = False, add: bool = False, gated: bool = False, bias: bool = False
    ):
        out = meta(tokens, rows, dtype=dtype)
        weight_rows = rows * (2 if gated else 1)
        return plan_skinny_linear(
            meta(tokens, columns, dtype=dtype),
            meta(weight_rows, columns, dtype=dtype),
            out,
            bias=meta(weight_rows, dtype=dtype) if bias else None,
            norm_weight=meta(columns, dtype=dtype) if norm else None,
            eps=_EPS,
            residual=out if add else None,
            gated=gated,
            activation=activation,
            pdl=pdl,
            shared_memory=shared_memory,
            tuning=tuning,
        )

    return [
        plan(sizes.hidden, sizes.qkv, norm=True, bias=sizes.qkv_bias),
        plan(sizes.attention, sizes.hidden, add=True),
        plan(sizes.hidden, sizes.intermediate, norm=True, gated=True),
        plan(sizes.intermediate, sizes.hidden, add=True),
        plan(sizes.hidden, sizes.vocab),
    ]


def _case(model: str, tokens: int) -> Case:
    build = partial(linears, MODELS[model], tokens)
    return Case(f"{model}-{tokens}", build, dot=tokens > 1, sized=True, tuned=True)


CASES = [
    _case("qwen3-0.6b", 8),
    *(_case(model, 1) for model in MODELS),
    _case("qwen3-0.6b", 16),
    _case("llama-3.2-1b", 8),
    _case("qwen3-8b", 16),
    _case("smollm2-135m", 16),
    *(
        Case(
            f"qwen3-0.6b-{tokens}-{act}",
            partial(linears, MODELS["qwen3-0.6b"], tokens, activation=act),
            dot=tokens > 1,
            sized=True,
            tuned=True,
        )
        for tokens, act in ((1, "gelu"), (8, "gelu_tanh"))
    ),  # fmt: skip
    Case("fp32-1", partial(linears, MODELS["smollm2-135m"], 1, dtype=torch.float32), sized=True, tuned=True),
    Case("fp32-16", partial(linears, MODELS["smollm2-135m"], 16, dtype=torch.float32), sized=True, tuned=True),
]
