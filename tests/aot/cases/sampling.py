"""Token choice over the vocabulary of Qwen3, for logits of both widths."""

from __future__ import annotations

from functools import partial

import torch
from harness import Case, meta

from tritonllm.kernels.kept_set import plan_kept_threshold
from tritonllm.kernels.launch import Launch
from tritonllm.kernels.sampling import plan_merge_picks, plan_pick_tokens

_BATCH = 64
_VOCAB_SIZE = 151936


def _sample(dtype: torch.dtype, hardware_log: bool = False) -> list[Launch]:
    """The launches of `pick_tokens`, of `sample_tokens`, which passes thresholds, and of two shards and their merge."""
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
        *plan_pick_tokens(logits, temperatures, seeds, positions, None, out, hardware_log=hardware_log),
        *plan_kept_threshold(logits, temperatures, top_ks, top_ps, thresholds),
        *plan_kept_threshold(logits, temperatures, top_ks, top_ps, thresholds, min_ps=temperatures),
        *plan_pick_tokens(logits, temperatures, seeds, positions, thresholds, out, hardware_log=hardware_log),
        *plan_pick_tokens(
            logits[:, :half],
            temperatures,
            seeds,
            positions,
            None,
            out,
            scores=scores,
            first_id=half,
            hardware_log=hardware_log,
        ),
        plan_merge_picks(shard_scores, shard_tokens, out),
    ]


CASES = [
    Case("qwen3-bf16", partial(_sample, torch.bfloat16)),
    Case("qwen3-fp32", partial(_sample, torch.float32)),
    Case(
        "qwen3-bf16-nvidia",
        partial(_sample, torch.bfloat16, hardware_log=True),
        only=("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"),
    ),
]
