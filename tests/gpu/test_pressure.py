"""What only shows on a full device: garbage in fresh memory, pools sized to the last gigabyte, offsets past 31 bits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hf_twins import SMOLLM2, make_engine

from tritonllm import LLMEngine, SamplingParams
from tritonllm.kernels.kv_store import store_kv

SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
}
"""Architecture keys of a model that starts in no time."""


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def prompts_of(lengths: tuple[int, ...], vocab: int = 49000) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("budget", [2048, 96])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_the_pool_held_before_is_never_read(value: float, budget: int) -> None:
    """Whole prompts and chunks, fresh and found in the cache, lengths around the size of a block."""
    prompts = prompts_of((1, 15, 16, 17, 31, 32, 33, 255, 256, 257))
    keys = {"block_size": 16, "max_cached_blocks": 200, "max_num_batched_tokens": budget}
    results = []
    for fill in (0.0, value):
        with make_engine(SMOLLM2, "bfloat16", **keys) as llm:
            with torch.inference_mode():
                llm.runner.pool.data.fill_(fill)
            fresh, found = (llm.generate(prompts, greedy(20)) for _ in range(2))
        assert sum(usage["cached_tokens"] for usage in found["usage"]) > 500
        results.append((fresh["token_ids"], found["token_ids"], fresh["finish_reason"]))
    assert results[0] == results[1]
    assert set(results[0][2]) == {"length"}


def test_a_pool_of_97_percent_leaves_room_for_graphs_and_a_full_batch() -> None:
    keys = {
        "max_cached_blocks": None,
        "gpu_memory_utilization": 0.97,
        "max_num_sequences": 512,
        "max_model_length": 640,
        "max_num_batched_tokens": 16384,
    }
    with make_engine("Qwen3-0.6B", "bfloat16", **keys) as llm:
        result = llm.generate(prompts_of((600,) * 512), greedy(40))
        assert llm.stats()["free_blocks"] == llm.stats()["total_blocks"]
    assert [len(tokens) for tokens in result["token_ids"]] == [40] * 512


def test_a_prompt_of_131072_tokens_in_one_chunk_and_in_sixteen() -> None:
    length = 131072
    (prompt,) = prompts_of((length,), vocab=512)
    keys = {
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_length": length + 16,
        "max_num_sequences": 1,
        **SMALL,
    }
    results = []
    for budget in (length, 8192):
        with LLMEngine("Qwen3-0.6B", max_cached_blocks=length // 256 + 1, max_num_batched_tokens=budget, **keys) as llm:
            results.append(llm.generate([prompt], greedy(8)))
    assert results[0]["token_ids"] == results[1]["token_ids"]
    assert results[0]["finish_reason"] == ["length"]


def test_keys_and_values_reach_blocks_whose_offsets_pass_31_bits() -> None:
    block_size, heads, head_dim = 256, 8, 128
    num_blocks = 2**31 // (block_size * heads * head_dim) + 2
    slots = [0, block_size * (num_blocks - 2), block_size * num_blocks - 1, -1]
    cache = torch.zeros(2, num_blocks, block_size, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, len(slots), heads, head_dim, device="cuda").bfloat16()
    store_kv(k, v, cache[0], cache[1], torch.tensor(slots, dtype=torch.int32, device="cuda"))
    for index, slot in enumerate(slots[:3]):
        block, offset = divmod(slot, block_size)
        assert torch.equal(cache[0, block, offset], k[index])
        assert torch.equal(cache[1, block, offset], v[index])
    assert int(cache.any(-1).any(-1).sum()) == 2 * 3


def test_without_a_c_compiler_the_start_fails_and_not_the_first_request(tmp_path) -> None:
    """Triton compiles its launchers in C when they are first used, which warm-up does."""
    code = (
        "from tritonllm import LLMEngine\n"
        f"LLMEngine('Qwen3-0.6B', load_format='dummy', max_model_length=64, max_cached_blocks=4, **{SMALL})\n"
        "print('ready')\n"
    )
    env = {**os.environ, "CC": "/nonexistent/cc", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "ready" not in done.stdout
    assert "/nonexistent/cc" in done.stderr or "C compiler" in done.stderr
