"""The engine on a GPU: graphs equal eager calls, nothing compiles once it is warm, memory comes back."""

from __future__ import annotations

import gc

import pytest
import torch
import triton
from hf_twins import make_engine

from tritonllm import SamplingParams
from tritonllm.engine import mixed_steps

LENGTHS = (1, 15, 16, 17, 255, 256, 257)


CONTROLS = {
    "temperature": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "logit_bias": {7: 3.0, 8: -100.0},
    "allowed_token_ids": range(0, 49000, 2),
    "min_tokens": 2,
    "logprobs": 5,
}


def prompts_of(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 49000, (length,), generator=generator).tolist() for length in lengths]


def params_of(count: int) -> list[SamplingParams]:
    """Greedy, plain, truncated and controlled rows that end at different steps, so that the batch shrinks."""
    kinds = ({"temperature": 0}, {"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.9}, {"top_k": 40}, CONTROLS)
    return [
        SamplingParams(max_tokens=5 + 7 * index, ignore_eos=True, seed=index, **kinds[index % 5])
        for index in range(count)
    ]


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "SmolLM2-135M-Instruct"])
def test_graphs_give_the_tokens_of_eager_calls_while_the_batch_shrinks(name):
    prompts, params = prompts_of(LENGTHS + (40,)), params_of(8)
    results = []
    for eager in (True, False):
        with make_engine(name, "bfloat16", enforce_eager=eager) as llm:
            results.append(llm.generate(prompts, params)["token_ids"])
    assert results[0] == results[1]
    assert [len(tokens) for tokens in results[0]] == [param.max_tokens for param in params]


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_a_batch():
    with make_engine("Qwen3-0.6B", "float32") as llm:
        prompts, params = prompts_of(LENGTHS), params_of(len(LENGTHS))
        together = llm.generate(prompts, params)["token_ids"]
        for index in (0, 1, 2, 3, 4):
            assert llm.generate([prompts[index]], params[index])["token_ids"] == [together[index]]


@pytest.mark.parametrize("controls", [{}, CONTROLS], ids=["plain", "controls"])
def test_preemption_gives_the_tokens_of_a_roomy_pool(controls):
    prompts = prompts_of((60,) * 12)
    params = SamplingParams(**{"temperature": 0, "max_tokens": 120, "ignore_eos": True, "seed": 3} | controls)
    results = []
    for blocks in (400, 40):
        with make_engine("SmolLM2-135M-Instruct", "float32", block_size=16, max_cached_blocks=blocks) as llm:
            results.append(llm.generate(prompts, params)["token_ids"])
            preemptions = llm.stats()["preemptions"]
    assert preemptions > 0
    assert results[0] == results[1]


def test_nothing_compiles_after_the_start():
    compiled: list[str] = []
    with make_engine("Qwen3-0.6B", "bfloat16", max_num_sequences=32) as llm:
        triton.knobs.runtime.jit_post_compile_hook = lambda **info: compiled.append(info["fn"].name)
        try:
            for batch in (1, 2, 3, 5, 15, 16, 17):
                for length in LENGTHS:
                    for kind in ({"temperature": 0}, {"temperature": 0.7}, {"top_p": 0.9}, CONTROLS):
                        params = SamplingParams(max_tokens=3, ignore_eos=True, **kind)
                        llm.generate(prompts_of((length,) * batch, seed=length), params)
        finally:
            triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled, sorted(set(compiled))


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_prompts_beside_decoding_compile_nothing(eager):
    """With graphs a short chunk is the replay of one and a long one shares its pass; without, all share one."""
    compiled: list[str] = []
    with make_engine("Qwen3-0.6B", "bfloat16", max_num_sequences=32, enforce_eager=eager) as llm:
        triton.knobs.runtime.jit_post_compile_hook = lambda **info: compiled.append(info["fn"].name)
        try:
            for count in (1, 3, 8, 17, 30):
                for kind in ({"temperature": 0}, {"top_p": 0.9}, CONTROLS):
                    params = SamplingParams(max_tokens=40, ignore_eos=True, **kind)
                    for prompt in prompts_of((9,) * count, seed=count):
                        llm.add_prompt(prompt, params)
                    for length in (700, 5, 130):
                        llm.step()
                        llm.add_prompt(prompts_of((length,), seed=length + count)[0], params)
                    while not llm.scheduler.is_finished():
                        llm.step()
        finally:
            triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled, sorted(set(compiled))


@pytest.mark.parametrize("form", ["one pass", "two passes"])
@pytest.mark.parametrize("controls", [{}, CONTROLS], ids=["plain", "controls"])
def test_a_prompt_beside_decoding_gives_the_tokens_of_one_alone(controls, form, monkeypatch):
    monkeypatch.setattr(mixed_steps, "one_pass_pays", lambda *_: form == "one pass")
    prompts = prompts_of((20, 33, 400, 5, 700))
    params = SamplingParams(**{"temperature": 0, "max_tokens": 60, "ignore_eos": True, "seed": 3} | controls)
    with make_engine("SmolLM2-135M-Instruct", "float32", max_prefill_tokens_beside_decode=96) as llm:
        alone = [llm.generate([prompt], params)["token_ids"][0] for prompt in prompts]
    with make_engine("SmolLM2-135M-Instruct", "float32", max_prefill_tokens_beside_decode=96) as llm:
        seq_ids, found = [], {}
        for prompt in prompts:
            seq_ids.append(llm.add_prompt(prompt, params))
            llm.step()
        while not llm.scheduler.is_finished():
            found.update((output.seq_id, output.token_ids) for output in llm.step()[0])
    assert [found[seq_id] for seq_id in seq_ids] == alone


@pytest.mark.parametrize("controls", [{}, CONTROLS], ids=["plain", "controls"])
def test_steps_never_wait_for_the_device(controls):
    """Decode, growth into new blocks, arrivals, chunks and ends: torch raises at every call that would wait."""
    params = SamplingParams(**{"temperature": 0.7, "max_tokens": 40, "ignore_eos": True} | controls)
    with make_engine("Qwen3-0.6B", "bfloat16", block_size=16, max_num_batched_tokens=256) as llm:
        llm.generate(prompts_of((20,)), params)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for arrivals in ((20, 300), (5,), (700, 31, 32), ()):
                for prompt in prompts_of(arrivals, seed=len(arrivals)):
                    llm.add_prompt(prompt, params)
                for _ in range(9):
                    llm.step()
            while not llm.scheduler.is_finished():
                llm.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def bytes_missing(before: int) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    return before - torch.cuda.mem_get_info()[0]


def test_memory_comes_back_after_exit():
    ones = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
    torch.mm(ones, ones)  # has the library of products loaded, which the process keeps
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    missing = []
    for _ in range(3):
        llm = make_engine("Qwen3-0.6B", "bfloat16", max_cached_blocks=None)
        assert before - torch.cuda.mem_get_info()[0] > before // 2
        llm.generate(prompts_of((20,)), SamplingParams(max_tokens=4))
        llm.exit()
        llm.exit()
        del llm
        missing.append(bytes_missing(before))
    held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    text = f"{missing} bytes are missing; tensors hold {held[0]} and the allocator {held[1]}"
    assert missing[0] < 200 * 2**20, text  # kernels, and a workspace of products for graphs
    assert missing[2] <= missing[1] + 2**20, text  # and engine after engine leaves nothing


def test_two_engines_live_in_one_process():
    prompts = prompts_of((30, 300))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    names = ("Qwen3-0.6B", "SmolLM2-135M-Instruct")
    alone = []
    for name in names:
        with make_engine(name, "bfloat16") as llm:
            alone.append(llm.generate(prompts, params)["token_ids"])
    engines = [make_engine(name, "bfloat16", gpu_memory_utilization=0.4) for name in names]
    ids = [[llm.add_prompt(prompt, params) for prompt in prompts] for llm in engines]
    done: list[dict[int, list[int]]] = [{}, {}]
    while any(not llm.scheduler.is_finished() for llm in engines):
        for llm, found in zip(engines, done, strict=True):
            found.update((output.seq_id, output.token_ids) for output in llm.step()[0])
    for llm in engines:
        llm.exit()
    assert [[found[seq_id] for seq_id in seq_ids] for found, seq_ids in zip(done, ids, strict=True)] == alone


def test_a_row_of_nan_fails_alone():
    # Untied, or the head would read the same NaN for every row.
    shape = {"vocab_size": 50000, "hidden_size": 512, "intermediate_size": 1024, "num_layers": 4, "num_heads": 8}
    with make_engine("Qwen3-0.6B", "bfloat16", num_kv_heads=4, head_dim=64, max_position=4096, **shape) as llm:
        with torch.inference_mode():
            llm.runner.model.model.embed_tokens.weight[77] = float("nan")
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        good = prompts_of((20, 300))
        expected = llm.generate(good, params)["token_ids"]
        result = llm.generate([good[0], [5, 77, 6], good[1]], params)
        assert result["finish_reason"] == ["length", "error", "length"]
        assert [result["token_ids"][0], result["token_ids"][2]] == expected
        assert llm.generate(good, params)["token_ids"] == expected
