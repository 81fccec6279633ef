"""A whole engine on the real kernels: tiny models give the greedy tokens that transformers gives.

Small on purpose (two layers, few ids, a few tokens): a program instance of the interpreter costs some twenty
milliseconds.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tritonllm import LLMEngine, SamplingParams
from tritonllm.kernels.launch import Launch, interpreting
from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

PROMPTS = [[5, 6, 7, 8], [9, 10]]
NUM_TOKENS = 4
SIZES = {"num_hidden_layers": 2, "vocab_size": 130}  # most programs are those of the rows of the vocabulary

CASES = {
    "grouped heads, tied, linear rope": ("llama", {"rope": "linear", "tie_word_embeddings": True}),
    "q and k norm": ("qwen3", {"heads": "4/4x32"}),
    "bias, 80 wide heads": ("qwen2", {"heads": "8/1x80"}),
}


def greedy(twin: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            tokens.append(int(twin(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(tmp_path, device: torch.device, case: str) -> None:
    family, arguments = CASES[case]
    twin = save_tiny_checkpoint(tiny_hf_config(family, **SIZES, **arguments), tmp_path)
    keys = {"dtype": "float32", "block_size": 4, "max_model_length": 8, "max_num_sequences": 2, "max_cached_blocks": 4}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLMEngine(str(tmp_path), device=device.type, **keys) as engine:
        tokens = engine.generate(PROMPTS, params)["token_ids"]
    assert tokens == [greedy(twin, prompt) for prompt in PROMPTS]


def test_chunks_in_the_middle_of_a_prompt(tmp_path, device: torch.device) -> None:
    """Where no prompt ends in a step, every kernel behind the last layer's keys and values is asked for 0 rows."""
    twin = save_tiny_checkpoint(tiny_hf_config("llama", **SIZES), tmp_path)
    keys = {"dtype": "float32", "block_size": 4, "max_model_length": 8, "max_num_sequences": 2, "max_cached_blocks": 4}
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLMEngine(str(tmp_path), device=device.type, max_num_batched_tokens=2, **keys) as engine:
        tokens = engine.generate(PROMPTS, params)["token_ids"]
    assert tokens == [greedy(twin, prompt)[:2] for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_a_prompt_beside_a_sequence_that_decodes(tmp_path, device: torch.device, family: str) -> None:
    """Without graphs both go through the model in one pass; with a window of 2."""
    fields = {"sliding_window": 2} if family == "mistral" else {}
    twin = save_tiny_checkpoint(tiny_hf_config(family, **SIZES, **fields), tmp_path)
    keys = {"dtype": "float32", "block_size": 4, "max_model_length": 8, "max_num_sequences": 2, "enforce_eager": True}
    left = {}
    with LLMEngine(str(tmp_path), device=device.type, **keys) as engine:
        for prompt, num_tokens in (([9, 10], 2), ([5, 6, 7], 1)):
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            left[engine.add_prompt(prompt, params)] = greedy(twin, prompt)[:num_tokens]
            engine.step()
        while not engine.scheduler.is_finished():
            for output in engine.step()[0]:
                assert output.token_ids == left.pop(output.seq_id)
    assert not left


def test_sampled_tokens_do_not_depend_on_the_batch(tmp_path, device: torch.device) -> None:
    save_tiny_checkpoint(tiny_hf_config("llama", num_hidden_layers=1, vocab_size=300), tmp_path)
    keys = {"dtype": "float32", "block_size": 4, "max_model_length": 8, "max_num_sequences": 2, "max_cached_blocks": 4}
    sampled = {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True}
    params = [SamplingParams(**sampled, seed=1), SamplingParams(**sampled, seed=2, top_k=20, top_p=0.9)]
    with LLMEngine(str(tmp_path), device=device.type, **keys) as engine:
        together = engine.generate(PROMPTS, params)["token_ids"]
        alone = [
            engine.generate([prompt], param)["token_ids"][0] for prompt, param in zip(PROMPTS, params, strict=True)
        ]
    assert together == alone


@pytest.mark.skipif(not interpreting(), reason="a GPU would not say which look-up failed, and none works after it")
@pytest.mark.parametrize("indices", [True, False], ids=["indices", "nothing"])
def test_kernels_that_do_not_run_leave_nothing_to_look_up_by(tmp_path, monkeypatch, indices: bool) -> None:
    """A start compiles ahead by a pass in which kernels do nothing, so what they would have written is poison here."""
    save_tiny_checkpoint(tiny_hf_config("llama", **SIZES), tmp_path)
    keys = {"dtype": "float32", "block_size": 4, "max_model_length": 8, "max_num_sequences": 18}
    ran: set[str] = set()
    skipped: set[str] = set()
    run = Launch.run

    def run_for_indices(launch: Launch) -> None:
        name = launch.kernel.fn.__name__
        if indices and launch.makes_indices:
            ran.add(name)
            run(launch)
        else:
            skipped.add(name)

    with LLMEngine(str(tmp_path), device="cpu", **keys) as engine, monkeypatch.context() as patch:
        patch.setattr(Launch, "run", run_for_indices)
        with contextlib.nullcontext() if indices else pytest.raises(IndexError), torch.inference_mode():
            engine.runner._compile_ahead()
    if indices:
        assert ran == {"_load_rows_kernel"}
        assert {"_decode_attention_kernel", "_prefill_attention_kernel", "_merge_kernel", "_collect_kernel"} <= skipped
