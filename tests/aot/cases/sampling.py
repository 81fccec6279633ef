"""Token choice over the vocabulary of Qwen3, for logits of both widths."""

from __future__ import annotations

from functools import partial

import torch
from harness import Case, meta

from tritonllm.kernels.kept_set import plan_kept_threshold, plan_sample_tokens
from tritonllm.kernels.launch import Launch
from tritonllm.kernels.logit_controls import plan_adjust_logits
from tritonllm.kernels.logprobs import plan_token_logprobs
from tritonllm.kernels.row_layout import HEADER, NUM_LOGPROBS
from tritonllm.kernels.sampling import plan_merge_picks, plan_pick_tokens

_BATCH = 64
_VOCAB_SIZE = 151936
_NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
_PORTABLE = ("sm_90", "gfx942", "gfx1100")  # on NVIDIA GPUs with TRITONLLM_PORTABLE=1 alone, and alike on all of them


def _sample(dtype: torch.dtype, hardware: bool = False) -> list[Launch]:
    """The launches of `pick_tokens`, of `kept_threshold`, of `sample_tokens`, and of two shards and their merge."""
    logits = meta(_BATCH, _VOCAB_SIZE, dtype=dtype)
    temperatures, top_ps, thresholds = (meta(_BATCH, dtype=torch.float32) for _ in range(3))
    top_ks, positions, out = (meta(_BATCH, dtype=torch.int32) for _ in range(3))
    seeds = meta(_BATCH, 2, dtype=torch.int32)
    scores, shard_scores, shard_tokens = (
        meta(*shape, dtype=kind)
        for shape, kind in (((_BATCH,), torch.float32), ((_BATCH, 2), torch.float32), ((_BATCH, 2), torch.int32))
    )
    half = _VOCAB_SIZE // 2
    return [
        *plan_pick_tokens(logits, temperatures, seeds, positions, out, hardware_log=hardware),
        *plan_kept_threshold(logits, temperatures, top_ks, top_ps, thresholds, hardware=hardware),
        *plan_sample_tokens(logits, temperatures, top_ks, top_ps, seeds, positions, out, hardware=hardware),
        *plan_pick_tokens(
            logits[:, :half],
            temperatures,
            seeds,
            positions,
            out,
            scores=scores,
            first_id=half,
            hardware_log=hardware,
        ),
        plan_merge_picks(shard_scores, shard_tokens, out),
    ]


def _control(dtype: torch.dtype, widths: tuple[int, ...], min_p: bool = False) -> list[Launch]:
    """`adjust_logits`, a draw with min-p from what it gives, and `token_logprobs` of so many columns."""
    logits, adjusted = meta(_BATCH, _VOCAB_SIZE, dtype=dtype), meta(_BATCH, _VOCAB_SIZE, dtype=torch.float32)
    rows = meta(_BATCH, HEADER + 128, dtype=torch.int32)
    counts = meta(_BATCH, _VOCAB_SIZE, dtype=torch.int16)
    masks, biases = meta(_BATCH, _VOCAB_SIZE // 32, dtype=torch.int32), meta(_BATCH, 1024, 3, dtype=torch.int32)
    bad_words, recent = meta(_BATCH, 512, 16, dtype=torch.int32), meta(_BATCH, 16, dtype=torch.int32)
    tokens, ranks = (meta(_BATCH, dtype=torch.int32) for _ in range(2))
    floats = rows.view(torch.float32)
    launches = plan_adjust_logits(logits, rows, counts, masks, biases, bad_words, recent, adjusted)
    if min_p:
        chosen = meta(_BATCH, dtype=torch.int32)
        columns = floats[:, 2], rows[:, 3], floats[:, 4], rows[:, 5:7], rows[:, 1]
        launches += plan_sample_tokens(adjusted, *columns, chosen, min_ps=floats[:, 7])
    for width in widths:
        outputs = meta(_BATCH, width, dtype=torch.float32), meta(_BATCH, width, dtype=torch.int32), ranks
        launches += plan_token_logprobs(logits, tokens, rows[:, NUM_LOGPROBS], *outputs)
    return launches


CASES = [
    Case("controls-bf16", partial(_control, torch.bfloat16, (1, 2), min_p=True)),
    Case("controls-bf16-widest", partial(_control, torch.bfloat16, (21,))),  # takes longest: not for every target
    Case("controls-fp32", partial(_control, torch.float32, (21,))),
    *(
        case
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
        for case in (
            Case(f"qwen3-{name}", partial(_sample, dtype), only=_PORTABLE),
            Case(f"qwen3-{name}-nvidia", partial(_sample, dtype, hardware=True), only=_NVIDIA),
        )
    ),
]
