"""The same checkpoint in this engine and in transformers: the same logits at every position, the same greedy tokens."""

from __future__ import annotations

import reprlib
import tempfile
from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Any

import torch

from tritonllm.engine.llm_engine import LLMEngine
from tritonllm.engine.model_runner import ModelRunner
from tritonllm.engine.sequence import Sequence
from tritonllm.hookspecs import ModelSpec
from tritonllm.registry import load_object
from tritonllm.sampling_params import SamplingParams
from tritonllm.testing.tiny_models import save_tiny_checkpoint, tiny_hf_config

TOLERANCE = 2e-4
"""Largest difference of float32 logits of size 1 to 20. Two layers differ by up to 2e-5 on a CPU, from the order of
sums alone; a wrong rotation, norm, bias or mask differs by 0.01 and more."""

BLOCK_SIZE = 16


def assert_matches_hf(
    spec: ModelSpec | None = None,
    hf_config: Any = None,
    *,
    num_tokens: int = 24,
    seed: int = 0,
    chunks: ListOf[int] = (1, 7),
    tolerance: float = TOLERANCE,
    device: str = "auto",
) -> None:
    """Build a tiny random model in transformers, load it through the engine in float32, and compare the two.

    Compared are the logits of all prompt positions computed at once, of the prompt in chunks, and of every decode
    step; then greedy tokens, with prompts whole and in chunks.

    Args:
        spec: the model family to test, registered or not. None tests the one that the registry finds for the
            architecture of `hf_config`.
        hf_config: a tiny transformers config. None takes what `spec.reference` returns, or else shrinks the config of
            the transformers class named by `spec.architectures[0]`.
        num_tokens: greedy tokens to compare.
        seed: of the weights and the prompt.
        chunks: sizes of prompt chunks.
        tolerance: largest difference of a logit.
        device: where the engine runs; transformers runs on the CPU.

    Raises:
        AssertionError: they differ; says where first, and what that points to.
        ValueError: neither a spec nor a config was given.
    """
    if hf_config is None:
        if spec is None:
            raise ValueError("assert_matches_hf needs a ModelSpec, a transformers config, or both")
        hf_config = reference_config(spec)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "tiny"
        twin = save_tiny_checkpoint(hf_config, folder, seed=seed)
        prompt = torch.randint(twin.config.vocab_size, (37,), generator=torch.Generator().manual_seed(seed)).tolist()
        assert_engine_matches(
            str(folder),
            twin,
            prompt,
            spec=spec,
            num_tokens=num_tokens,
            chunks=chunks,
            tolerance=tolerance,
            device=device,
        )


def reference_config(spec: ModelSpec) -> Any:
    """The tiny transformers config that a family is compared with.

    Raises:
        ValueError: the spec names none, and its architecture is not one of transformers; or it returns something else.
    """
    import transformers

    if spec.reference is not None:
        config = load_object(spec.reference)()
        if not isinstance(config, transformers.PretrainedConfig):
            raise ValueError(f"{spec.reference!r} must return a transformers config, got {reprlib.repr(config)}")
        return config
    model_class = getattr(transformers, spec.architectures[0], None) if spec.architectures else None
    if model_class is None:
        raise ValueError(
            f"ModelSpec {spec.name!r}: transformers has no class named by architectures[0] of {spec.architectures}; "
            "set `reference` to a function that returns a tiny transformers config, or pass hf_config"
        )
    return tiny_hf_config(model_class.config_class.model_type)


def assert_engine_matches(
    name_or_path: str,
    twin: Any,
    prompt: list[int],
    *,
    spec: ModelSpec | None = None,
    num_tokens: int = 24,
    chunks: ListOf[int] = (1, 7),
    tolerance: float = TOLERANCE,
    device: str = "auto",
) -> None:
    """As `assert_matches_hf`, for a checkpoint that exists and a transformers model (on the CPU, float32) of the same
    weights; both are fed `prompt`, token ids. A spec is used whatever the checkpoint's name and architecture."""
    tokens, expected = _greedy(twin, prompt, num_tokens)
    length = len(tokens)
    keys: dict[str, Any] = {
        "spec": spec,
        "dtype": "float32",
        "device": device,
        "block_size": BLOCK_SIZE,
        "max_model_length": length,
        "max_num_sequences": 2,
        "max_cached_blocks": 2 * -(-length // BLOCK_SIZE),
    }
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with LLMEngine(name_or_path, **keys, max_num_batched_tokens=length) as engine:
        whole = prefill_logits(engine.runner, prompt, len(prompt))
        _assert_logits(whole, expected, 0, tolerance, "the whole prompt")
        for size in chunks:
            chunked = prefill_logits(engine.runner, prompt, size)
            _assert_logits(chunked, expected, 0, tolerance, f"the prompt in chunks of {size}")
        decoded = _decode(engine.runner, tokens, len(prompt))
        _assert_logits(decoded, expected, len(prompt), tolerance, "decoding one token at a time")
        (ours,) = engine.generate([prompt], greedy)["token_ids"]
        _assert_tokens(ours, tokens[len(prompt) :], "the whole prompt")
    for size in chunks:
        with LLMEngine(name_or_path, **keys, max_num_batched_tokens=size) as engine:
            (ours,) = engine.generate([prompt], greedy)["token_ids"]
            _assert_tokens(ours, tokens[len(prompt) :], f"the prompt in chunks of {size}")


def _greedy(twin: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Prompt and greedy completion, and the logits `[tokens, vocabulary]` after each token; without any cache."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            tokens.append(int(twin(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        return tokens, twin(torch.tensor([tokens]), use_cache=False).logits[0].float()


def prefill_logits(runner: ModelRunner, tokens: list[int], chunk: int) -> torch.Tensor:
    """Logits of every token of a prompt, computed `chunk` tokens at a time."""
    logits = []
    for start in range(0, len(tokens), chunk):
        seq = _sequence(tokens[: start + chunk], start, runner.num_blocks)
        logits.append(runner.run_model(runner.prepare_prefill([seq]), is_prefill=True, all_positions=True))
    return torch.cat(logits).float().cpu()


def _decode(runner: ModelRunner, tokens: list[int], num_prompt_tokens: int) -> torch.Tensor:
    """Logits of the tokens behind a prompt whose keys and values are stored, one decode step for each."""
    logits = []
    for stop in range(num_prompt_tokens + 1, len(tokens) + 1):
        seq = _sequence(tokens[:stop], stop - 1, runner.num_blocks)
        logits.append(runner.run_model(runner.prepare_decode([seq]), is_prefill=False))
    return torch.cat(logits).float().cpu()


def _sequence(tokens: list[int], num_computed: int, num_blocks: int) -> Sequence:
    """A sequence in the blocks of the pool from the last one down, so that a table read wrongly shows."""
    seq = Sequence(tokens, block_size=BLOCK_SIZE)
    seq.block_table = [num_blocks - 1 - index for index in range(seq.num_blocks)]
    seq.num_computed_tokens = num_computed
    return seq


def _assert_logits(ours: torch.Tensor, theirs: torch.Tensor, first: int, tolerance: float, what: str) -> None:
    theirs = theirs[first : first + len(ours)]
    if ours.shape != theirs.shape:
        raise AssertionError(f"{what}: logits are {list(ours.shape)}, those of transformers {list(theirs.shape)}")
    difference = (ours - theirs).abs()
    wrong = ~(difference <= tolerance)  # NaN is wrong too
    if not wrong.any():
        return
    rows = wrong.any(dim=1).nonzero().flatten()
    row = int(rows[0])
    token = int(difference[row].nan_to_num(nan=torch.inf).argmax())
    if first == 0 and row == 0:
        hint = (
            "a single token attends to itself alone: look at weights, biases, norms, the MLP and the head, or, if all "
            "layers agree, at factors and caps of logits"
        )
    elif first == 0:
        hint = "tokens before it agree: look at positions, rotary embedding, mask and the attention scale"
    else:
        hint = "the prompt agrees: look at what the model does differently when it decodes"
    raise AssertionError(
        f"{what}: logits differ from transformers at {len(rows)} of {len(ours)} positions, first at position "
        f"{first + row}, most there for token id {token}: {ours[row, token]:.6g} here, {theirs[row, token]:.6g} in "
        f"transformers, {tolerance:g} allowed; {hint}"
    )


def _assert_tokens(ours: list[int], theirs: list[int], what: str) -> None:
    if ours == theirs:
        return
    step = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
    raise AssertionError(
        f"{what}: greedy tokens differ from transformers from completion token {step} on, although logits agree: "
        f"{ours[step : step + 8]} here, {theirs[step : step + 8]} in transformers"
    )
