"""Engines beside the transformers model of the same weights."""

from __future__ import annotations

import json
from importlib import resources

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tritonllm import LLMEngine, Sequence
from tritonllm.engine.block_manager import BlockManager
from tritonllm.weights import open_checkpoint
from tritonllm.weights.dummy import dummy_tensor

SMOLLM2 = "SmolLM2-135M-Instruct"
MODELS = [SMOLLM2, "Qwen3-0.6B", "Llama-3.2-1B"]


def make_engine(name: str, dtype: str, **keys: object) -> LLMEngine:
    """Real weights for SmolLM2, dummy weights of the shipped shape for the others."""
    load_format = "auto" if name == SMOLLM2 else "dummy"
    settings = {"max_cached_blocks": 64, "max_model_length": 2048, "max_num_batched_tokens": 2048, **keys}
    return LLMEngine(name, dtype=dtype, load_format=load_format, **settings)


def make_twin(name: str, weights_dtype: torch.dtype, dtype: torch.dtype) -> torch.nn.Module:
    """The transformers model with the engine's weights rounded to `weights_dtype`, computing in `dtype`."""
    if name == SMOLLM2:
        checkpoint = open_checkpoint(name)
        config = AutoConfig.for_model(**checkpoint.config)
        tensors = dict(checkpoint.tensors())
    else:
        file = resources.files("tritonllm.bench") / "configs" / f"{name}.json"
        config = AutoConfig.for_model(**json.loads(file.read_text()))
        tensors = None
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if tensors is None:
                tensor = dummy_tensor(0, key, tuple(parameter.shape), torch.device("cuda"))
            else:
                tensor = tensors[key]
            parameter.copy_(tensor.to("cuda").to(weights_dtype))
    return model.eval()


@torch.inference_mode()
def twin_logits(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """float32 logits `[tokens, vocabulary]`."""
    return model(torch.tensor([token_ids], device="cuda")).logits[0].float()


@torch.inference_mode()
def twin_greedy(model: torch.nn.Module, token_ids: list[int], num_tokens: int) -> list[int]:
    """Greedy completion by transformers' own cache, end-of-text ignored."""
    past, inputs, completion = None, torch.tensor([token_ids], device="cuda"), []
    for _ in range(num_tokens):
        out = model(inputs, past_key_values=past, use_cache=True)
        past, inputs = out.past_key_values, out.logits[:, -1:].argmax(-1)
        completion.append(int(inputs))
    return completion


def engine_logits(llm: LLMEngine, token_ids: list[int], boundaries: list[int], decode_from: int) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of the engine's own path: prompt chunks ending at `boundaries`, then decode steps.

    Args:
        llm: an engine at rest.
        token_ids: the text.
        boundaries: where chunks end; the last one is `decode_from`.
        decode_from: tokens from here on are decoded one by one.
    """
    runner = llm.runner
    manager = BlockManager(runner.num_blocks, llm.config.block_size)
    seq = Sequence(token_ids[: boundaries[0]], block_size=llm.config.block_size)
    whole = Sequence(token_ids, block_size=llm.config.block_size)
    manager.allocate(whole)
    seq.block_table = whole.block_table
    logits = []
    for start, stop in zip([0, *boundaries[:-1]], boundaries, strict=True):
        seq.num_computed_tokens = start
        seq.token_ids = token_ids[:stop]
        ids = runner.prepare_prefill([seq])
        logits.append(runner.run_model(ids, True, all_positions=True))
    for position in range(decode_from, len(token_ids)):
        seq.token_ids = token_ids[: position + 1]
        logits.append(runner.run_model(runner.prepare_decode([seq]), False))
    return torch.cat(logits).float()
