"""All-reduces over peer memory at hidden sizes of shipped models, alone, with the norm, and of parts."""

from __future__ import annotations

from functools import partial

import torch
from harness import Case, meta

from tritonllm.kernels.launch import Launch
from tritonllm.kernels.peer_all_reduce import Norm, plan_one_shot, plan_two_shot
from tritonllm.kernels.peer_buffer import MAX_CHANNELS, PeerBuffer

NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def _launches(columns: int, dtype: torch.dtype, size: int) -> list[Launch]:
    addresses, state = meta(size, dtype=torch.int64), meta(MAX_CHANNELS + 1, dtype=torch.int32)
    buffer = PeerBuffer(0, size, addresses, state, MAX_CHANNELS)
    x = meta(8, columns, dtype=dtype)
    norm = Norm(meta(8, columns, dtype=dtype), meta(columns, dtype=dtype), 1e-6)
    parts = meta(4, 8, columns, dtype=torch.float32)
    return [
        plan(terms, meta(8, columns, dtype=dtype), after, buffer)
        for plan in (plan_one_shot, plan_two_shot)
        for terms, after in ((x, None), (x, norm), (parts, norm))
    ]


CASES = [
    Case(f"{columns}-{size}-{str(dtype)[6:]}", partial(_launches, columns, dtype, size), only=NVIDIA)
    for columns, dtype, size in (
        (4096, torch.bfloat16, 2),
        (8192, torch.bfloat16, 2),
        (8192, torch.bfloat16, 8),
        (4096, torch.float32, 2),
        (5120, torch.float16, 3),
    )
]
