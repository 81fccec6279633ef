"""Ranks on GPUs, through NCCL, with their collectives inside the graphs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch
from hf_twins import make_engine

from tritonllm import SamplingParams
from tritonllm.errors import EngineError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

PROMPTS = [[7, 8, 9], list(range(100, 160)), list(range(300, 557))]


@pytest.mark.parametrize("eager", [True, False])
def test_two_gpus_give_the_tokens_of_one(eager: bool) -> None:
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=1, **kind)
        for kind in ({"temperature": 0}, {"temperature": 0.8}, {"top_k": 40})
    ]
    results = []
    for world_size in (1, 2):
        with make_engine("Qwen3-0.6B", "float32", enforce_eager=eager, world_size=world_size) as llm:
            results.append(llm.generate(PROMPTS, params)["token_ids"])
    assert results[0] == results[1]


def test_a_rank_that_is_killed_ends_the_engine() -> None:
    llm = make_engine("Qwen3-0.6B", "bfloat16", world_size=2)
    llm.add_prompt(PROMPTS[0], SamplingParams(max_tokens=1000, ignore_eos=True))
    llm.step()
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    start = time.monotonic()

    def go_on() -> None:
        while True:
            llm.step()

    with pytest.raises(EngineError, match="rank 1 of 2 ended with exit code -9"):
        go_on()
    assert time.monotonic() - start < 5
    llm.exit()
    assert multiprocessing.active_children() == []
