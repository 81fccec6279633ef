"""What the kit checks, in the order in which an author should look."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from tritonllm.config import EngineConfig
from tritonllm.conformance.candidate import NUM_TOKENS, Candidate
from tritonllm.engine.resolve import build_model, resolve_model
from tritonllm.errors import CheckpointError
from tritonllm.models.tensor_parallel import TPGroup
from tritonllm.testing.equality import assert_way_agrees
from tritonllm.testing.hf_comparison import assert_engine_matches, prefill_logits
from tritonllm.testing.layer_comparison import assert_layers_match
from tritonllm.weights import load_weights, meta_tensors, open_checkpoint
from tritonllm.weights.targets import find_targets

Check = Callable[[Candidate], None]

_KEPT = "look at what the model keeps from one step to the next outside of the KV cache"

WAYS = {
    "all in one batch, eager": "look at what mixes the tokens of several sequences",
    "all in one batch": "look at values that Python reads or makes in the forward pass: a graph repeats the first ones",
    "chunks of 7": "look at what depends on the place of a token in the batch in place of its position",
    "prefix cache": _KEPT,
    "preempted": _KEPT,
    "two ranks": "look at what is split by hand and at sums over the ranks, such as that of `RowLinear`",
}
"""Of the equality suite those that differ most, each with where to look. "all in one batch" decodes in graphs."""


def loads(candidate: Candidate) -> None:
    """The family's class and config reader take the twin, and every tensor of it finds its parameter."""
    if candidate.loading_error is not None:
        raise candidate.loading_error


def layers(candidate: Candidate) -> None:
    """The hidden states after every layer are those of transformers."""
    with candidate.engine() as engine:
        assert_layers_match(engine, candidate.twin, candidate.prompts[1])


def logits_and_tokens(candidate: Candidate) -> None:
    """Logits and greedy tokens are those of transformers: the prompt whole, in chunks, token by token."""
    assert_engine_matches(
        candidate.folder,
        candidate.twin,
        candidate.prompts[1],
        spec=candidate.spec,
        num_tokens=NUM_TOKENS,
        chunks=(7,),
        device=candidate.device,
    )


def weights(candidate: Candidate) -> None:
    """Without any one tensor loading fails and names it, with one too many as well, and every tensor is read."""
    tensors = dict(open_checkpoint(candidate.folder).tensors())
    with candidate.engine() as engine, torch.inference_mode():
        model = cast(nn.Module, engine.runner.model)
        loaded = load_weights(model, tensors.items()).loaded
        for left_out in loaded:
            rest = ((name, tensor) for name, tensor in tensors.items() if name != left_out)
            if left_out not in _refusal(model, rest):
                raise AssertionError(f"the checkpoint loads without {left_out}: nothing asks for that weight")
        extra = f"{loaded[0]}.extra"
        if extra not in _refusal(model, {**tensors, extra: torch.zeros(1)}.items()):
            raise AssertionError(
                f"the checkpoint loads with a tensor {extra} that no parameter takes: `ignored_weights` is too wide"
            )
        unread = _unread(candidate, engine.runner, model, {name: tensors[name] for name in loaded})
    if unread:
        raise AssertionError(
            f"the model loads these weights and never uses them, its logits stay the same without: {', '.join(unread)}"
        )


def _refusal(model: nn.Module, tensors: object) -> str:
    try:
        load_weights(model, tensors)  # type: ignore[arg-type]
    except CheckpointError as error:
        return str(error)
    return ""


def _unread(candidate: Candidate, runner: object, model: nn.Module, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of the weights that may be anything."""
    targets, _ = find_targets(model)
    prompt = candidate.prompts[0]
    for name, tensor in tensors.items():
        targets[name].load(tensor)
    before = prefill_logits(runner, prompt, len(prompt))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    unread = []
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator) * tensor.abs().mean()
        targets[name].load(tensor + noise)
        if torch.equal(prefill_logits(runner, prompt, len(prompt)), before):  # type: ignore[arg-type]
            unread.append(name)
        targets[name].load(tensor)
    return unread


def real_checkpoint(candidate: Candidate) -> None:
    """The config of the checkpoint is read, and its tensors have the names and shapes that the model asks for."""
    if candidate.checkpoint is None:
        return
    config = EngineConfig(candidate.checkpoint, dtype="float32", enforce_eager=True)
    resolved = resolve_model(config, spec=candidate.spec, recorded=True)
    model = cast(nn.Module, build_model(resolved, TPGroup()))
    _, shared = find_targets(model)
    # The copy of a tied head has no parameter to be compared with.
    tensors = meta_tensors(open_checkpoint(candidate.checkpoint))
    load_weights(model, ((name, tensor) for name, tensor in tensors if name not in shared))


def _way(name: str) -> Check:
    def check(candidate: Candidate) -> None:
        keys = candidate.keys
        if name == "two ranks" and torch.cuda.device_count() < 2:
            keys["device"] = "cpu"
            expected = candidate.alone_on_cpu
        else:
            expected = candidate.alone
        try:
            assert_way_agrees(name, candidate.folder, candidate.prompts, candidate.params, keys, expected)
        except AssertionError as error:
            raise AssertionError(f"{error}; {WAYS[name]}") from error

    check.__doc__ = f"The tokens of each prompt alone, {name}."
    return check


CHECKS: dict[str, Check] = {
    "loads": loads,
    "weights": weights,
    "layers": layers,
    "logits and tokens": logits_and_tokens,
    **{name: _way(name) for name in WAYS},
    "checkpoint": real_checkpoint,
}
"""Name to check. Each raises AssertionError or TritonLLMError in plain words. Only the first and the last, which is for
candidates with a checkpoint, make sense where the first fails."""
