"""Ranks on GPUs, through NCCL, with their collectives inside the graphs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from hf_twins import make_engine

from tritonllm import SamplingParams, Sequence
from tritonllm.engine.block_manager import BlockManager
from tritonllm.errors import EngineError
from tritonllm.models import decode_path
from tritonllm.models.decode_path import DecodePath

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

FEW = {"max_num_sequences": 4, "max_num_batched_tokens": 512}
"""As many rows as prompts, so one is padding once the first has ended. Fewer sizes start sooner, here many times."""

PROMPTS = [[7, 8, 9], list(range(100, 160)), list(range(300, 557)), list(range(600, 620))]


ENDS: list[dict[str, Any]] = [
    {"max_tokens": 24, "temperature": 0},
    {"max_tokens": 24, "temperature": 0.8},
    {"max_tokens": 16, "top_k": 40},
    {"max_tokens": 8, "min_p": 0.02, "repetition_penalty": 1.2, "logit_bias": {7: 3.0}, "logprobs": 1},
]
"""From the last to the first they end, so that steps choose in every way: with controls, filtered and plainly."""


@pytest.mark.parametrize("eager", [True, False])
def test_two_gpus_give_the_tokens_of_one(eager: bool) -> None:
    params = [SamplingParams(ignore_eos=True, seed=1, **end) for end in ENDS]
    results = []
    for world_size in (1, 2):
        with make_engine("Qwen3-0.6B", "float32", enforce_eager=eager, world_size=world_size, **FEW) as llm:
            results.append(llm.generate(PROMPTS, params)["token_ids"])
    assert results[0] == results[1]


SKINNY, MIXED, HOPPER, SEPARATE = DecodePath.SKINNY, DecodePath.MIXED, DecodePath.HOPPER, DecodePath.SEPARATE
PATHS: dict[str, dict[int, DecodePath]] = {
    "Llama-3.2-1B": {1: SKINNY, 24: HOPPER, 160: SEPARATE, 176: MIXED},
    "Qwen3-0.6B": {4: SKINNY, 16: HOPPER},
}
"""By rows, of an H200; on other GPUs they may be others."""

IN_FEATURES = {"Llama-3.2-1B": (2048, 2048, 8192), "Qwen3-0.6B": (1024, 2048, 3072)}


def decode_logits(name: str, world_size: int, all_reduce: str) -> dict[int, torch.Tensor]:
    """bfloat16 logits of a decode step of as many rows as each path takes, float32 `[rows, vocabulary]`."""
    rows = max(PATHS[name])
    keys = {"max_num_sequences": rows, "max_cached_blocks": rows, "max_model_length": 256, "enforce_eager": True}
    keys["max_num_batched_tokens"] = 1024  # more than are there, and soon gone through at the start
    with make_engine(name, "bfloat16", world_size=world_size, all_reduce=all_reduce, **keys) as llm:
        runner = llm.runner
        manager = BlockManager(runner.num_blocks, llm.config.block_size)
        seqs = [Sequence([100 + row, 7, 8 * row, 9], block_size=llm.config.block_size) for row in range(rows)]
        for seq in seqs:
            manager.allocate(seq)
        runner.run_model(runner.prepare_prefill(seqs), True)
        return {
            count: runner.run_model(runner.prepare_decode(seqs[:count]), False).float().cpu() for count in PATHS[name]
        }


@pytest.mark.parametrize(("name", "ways"), [("Llama-3.2-1B", ("auto", "nccl")), ("Qwen3-0.6B", ("auto",))])
def test_every_decode_path_over_two_gpus_gives_the_logits_of_one(name: str, ways: tuple[str, ...]) -> None:
    """As near as bfloat16 comes; a rank's term that is left out, or added twice, would be off by about the whole."""
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability()[0] == 9:
        chosen = {
            rows: decode_path.decode_path(rows, IN_FEATURES[name], torch.bfloat16, device) for rows in PATHS[name]
        }
        assert chosen == PATHS[name]
    expected = decode_logits(name, 1, "auto")
    for all_reduce in ways:
        for rows, logits in decode_logits(name, 2, all_reduce).items():
            error = (logits - expected[rows]).norm() / expected[rows].norm()
            assert error < 0.05, (all_reduce, rows, error)


@pytest.mark.parametrize("eager", [True, False])
def test_a_rank_that_is_killed_ends_the_engine_and_another_can_be_made(eager: bool) -> None:
    """NCCL aborts only once no graph holds its collectives."""
    llm = make_engine("Qwen3-0.6B", "bfloat16", world_size=2, enforce_eager=eager, **FEW)
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
    with make_engine("Qwen3-0.6B", "bfloat16", world_size=2, enforce_eager=eager, **FEW) as another:
        assert len(another.generate([PROMPTS[0]], SamplingParams(max_tokens=8, ignore_eos=True))["token_ids"][0]) == 8


def test_an_idle_engine_notices_too_and_memory_comes_back() -> None:
    make_engine("Qwen3-0.6B", "bfloat16", **FEW).exit()  # what a process keeps anyhow
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    llm = make_engine("Qwen3-0.6B", "bfloat16", world_size=2, **FEW)
    (process,) = multiprocessing.active_children()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    llm.add_prompt(PROMPTS[0])
    with pytest.raises(EngineError, match="rank 1 of 2 ended with exit code -9"):
        llm.step()
    llm.exit()
    del llm
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info()[0] < 512 * 2**20


def test_exit_leaves_in_seconds() -> None:
    llm = make_engine("Qwen3-0.6B", "bfloat16", world_size=2, **FEW)
    llm.generate([PROMPTS[0]], SamplingParams(max_tokens=8, ignore_eos=True))
    start = time.monotonic()
    llm.exit()
    assert time.monotonic() - start < 5  # a rank that does not leave by itself is killed only then
    assert multiprocessing.active_children() == []


SCRIPT = """
import os
from tritonllm import LLMEngine, SamplingParams
keys = {"max_num_sequences": 4, "max_model_length": 1024, "max_num_batched_tokens": 512}
with LLMEngine("Qwen3-0.6B", load_format="dummy", dtype="float32", world_size=SIZE, **keys) as engine:
    print(engine.generate([[7, 8, 9]], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))["token_ids"])
"""


def test_torchrun_gives_the_tokens_of_one(tmp_path) -> None:
    results = []
    for size in (1, 2):
        script = tmp_path / f"script{size}.py"
        script.write_text(SCRIPT.replace("SIZE", str(size)))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if size == 2 else []
        done = subprocess.run([sys.executable, *launcher, str(script)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        results.append(done.stdout)
    assert results[0] == results[1]
