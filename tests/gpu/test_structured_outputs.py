"""Steps whose masks come late: two graphs and an upload beside the first, with the tokens of eager calls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
from hf_twins import SMOLLM2, make_engine

from tritonllm import LLMEngine, SamplingParams, StructuredOutputsParams
from tritonllm.engine.control_state import mask_words

BOUND = SamplingParams(
    temperature=0.8, seed=5, max_tokens=40, structured_outputs=StructuredOutputsParams(regex="whatever")
)
FREE = SamplingParams(temperature=0.8, seed=6, max_tokens=40, ignore_eos=True)


class Residues:
    """Stands for a grammar without a tokenizer: token i of a completion is i modulo 7."""

    error = None  # it never fails

    def __init__(self, vocab_size: int) -> None:
        width = -(-vocab_size // 32)
        self._masks = [mask_words(range(rest, vocab_size, 7), width).tobytes() for rest in range(7)]
        self.num_tokens = 0

    def accept(self, token_ids: list[int]) -> str | None:
        assert all(token % 7 == (self.num_tokens + index) % 7 for index, token in enumerate(token_ids))
        self.num_tokens += len(token_ids)
        return None

    def mask(self) -> bytes:
        return self._masks[self.num_tokens % 7]


class ResidueGrammars:
    """Stands for `Grammars`: every grammar is that one."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def check(self, params: SamplingParams) -> None:
        pass

    def matcher(self, params: SamplingParams) -> Residues | None:
        return None if params.structured_outputs is None else Residues(self._vocab_size)


def residues_of(llm: LLMEngine) -> LLMEngine:
    """The same engine, for which every grammar is that one."""
    llm._grammars = ResidueGrammars(llm.model_config.vocab_size)
    return llm


def prompts_of(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 49000, (length,), generator=generator).tolist() for length in lengths]


def mixed_params(count: int) -> list[SamplingParams]:
    """Rows with a grammar, greedy, plain, filtered and with penalties, beside rows without."""
    bound = [replace(BOUND, max_tokens=6 + 5 * index, seed=index) for index in range(count)]
    fields = ({}, {"temperature": 0}, {"top_p": 0.9}, {"presence_penalty": 1.0, "logprobs": 3})
    bound = [replace(params, **fields[index // 2 % 4]) for index, params in enumerate(bound)]
    return [params if index % 2 else replace(FREE, seed=index) for index, params in enumerate(bound)]


LENGTHS = (1, 15, 16, 17, 255, 256, 257, 40, 9, 11)


def test_graphs_give_the_tokens_of_eager_calls_and_rows_without_a_grammar_those_they_give_alone():
    prompts, params = prompts_of(LENGTHS), mixed_params(len(LENGTHS))
    results = []
    for eager in (True, False):
        with residues_of(make_engine("Qwen3-0.6B", "bfloat16", enforce_eager=eager)) as llm:
            results.append(llm.generate(prompts, params)["token_ids"])
    assert results[0] == results[1]
    for tokens, param in zip(results[0], params, strict=True):
        if param.structured_outputs is not None:
            assert [token % 7 for token in tokens] == [index % 7 for index in range(len(tokens))]
    with residues_of(make_engine("Qwen3-0.6B", "float32")) as llm:  # in which the size of a batch changes no token
        together = llm.generate(prompts, params)["token_ids"]
        assert [llm.generate([p], q)["token_ids"][0] for p, q in zip(prompts, params, strict=True)] == together


def test_preemption_gives_the_tokens_of_a_roomy_pool():
    prompts, params = prompts_of((60,) * 12), [replace(BOUND, max_tokens=120, seed=index) for index in range(12)]
    results = []
    for blocks in (400, 40):
        with residues_of(make_engine(SMOLLM2, "float32", block_size=16, max_cached_blocks=blocks)) as llm:
            results.append(llm.generate(prompts, params)["token_ids"])
            preemptions = llm.stats()["preemptions"]
    assert preemptions > 0
    assert results[0] == results[1]


def test_nothing_compiles_and_the_host_waits_for_nothing_but_tokens():
    compiled: list[str] = []
    keys = {"max_num_sequences": 32, "block_size": 16, "max_num_batched_tokens": 256}
    with residues_of(make_engine("Qwen3-0.6B", "bfloat16", **keys)) as llm:
        llm.generate(prompts_of((20,)), BOUND)
        triton.knobs.runtime.jit_post_compile_hook = lambda **info: compiled.append(info["fn"].name)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for arrivals in ((20, 300), (5,), (700, 31, 32), ()):
                for prompt, params in zip(prompts_of(arrivals, seed=len(arrivals)), (BOUND, FREE, BOUND), strict=False):
                    llm.add_prompt(prompt, params)
                for _ in range(9):
                    llm.step()
            while not llm.scheduler.is_finished():
                llm.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled, sorted(set(compiled))


def test_masks_wait_for_no_forward_pass_and_the_choice_waits_for_them():
    """The upload of a step's masks ends while a long kernel before them runs, and what reads them comes behind."""
    with make_engine(SMOLLM2, "bfloat16") as llm, torch.inference_mode():
        runner, stream = llm.runner, torch.cuda.current_stream()
        words = np.arange(runner.controls.masks.shape[1], dtype=np.int32)
        runner.controls.write_masks([(1, words.tobytes())], runner._copies)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
        runner.controls.write_masks([(3, words.tobytes())], runner._copies)
        runner._copies.synchronize()
        assert not stream.query(), "the upload waited for the kernel before it"
        stream.synchronize()
        assert torch.equal(runner.controls.masks[3].cpu(), torch.from_numpy(words))


@pytest.mark.parametrize("form", [{"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 5}}])
def test_a_real_grammar_is_followed(form):
    pytest.importorskip("llguidance")
    import json

    with make_engine(SMOLLM2, "bfloat16") as llm:
        params = SamplingParams(temperature=1.0, seed=2, max_tokens=200, n=8)
        params = replace(params, structured_outputs=StructuredOutputsParams(**form))
        (samples,) = llm.generate(["Some numbers:"], params)["text"]
        for text in samples:
            assert len(json.loads(text)) <= 5
