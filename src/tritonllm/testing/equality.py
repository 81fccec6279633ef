"""Many ways to compute the same tokens: each must give what a prompt gives alone in a fresh engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tritonllm.engine.async_llm_engine import AsyncLLMEngine
from tritonllm.engine.llm_engine import LLMEngine
from tritonllm.sampling_params import SamplingParams

Tokens = list[int]
Way = Callable[[str, list[Tokens], list[SamplingParams], dict[str, Any]], list[Tokens]]
"""`way(name_or_path, prompts, sampling_params, engine_keys)`: the completion of each prompt."""

WAYS: dict[str, Way] = {}
"""Name to function, in the order of their registration."""

WAYS_ON_REQUEST: set[str] = set()
"""Names that run only where they are asked for."""

BLOCK_SIZE = 16


def register_way(name: str, *, on_request: bool = False) -> Callable[[Way], Way]:
    """Decorator that adds a function to `WAYS`.

    Args:
        name: words that an error can begin with.
        on_request: leave it out unless `assert_ways_agree` is given its name, for ways that are slow or need a machine
            of their own.

    Raises:
        ValueError: the name is taken.
    """

    def register(way: Way) -> Way:
        if name in WAYS:
            raise ValueError(f"there is a way named {name!r} already; choose another name")
        WAYS[name] = way
        if on_request:
            WAYS_ON_REQUEST.add(name)
        return way

    return register


def assert_ways_agree(
    name_or_path: str,
    prompts: list[Tokens],
    num_tokens: int = 24,
    ways: list[str] | None = None,
    *,
    sampled: bool = False,
    **engine_keys: Any,
) -> None:
    """Complete prompts in every way of `WAYS` and compare with each prompt alone in a fresh engine.

    Args:
        name_or_path: the checkpoint.
        prompts: token ids; some should share more than a block of 16, and fill more than the pool of one request.
        num_tokens: tokens to generate for each.
        ways: names of `WAYS`; None is all but those on request.
        sampled: with temperature, top-k, top-p and a seed for each prompt, instead of greedily.
        engine_keys: further configuration, such as `device`, and the `spec` of a family that is not registered.

    Raises:
        AssertionError: a way gives other tokens, or does not do what its name says; names way, prompt and token.
    """
    keys = {"dtype": "float32", **engine_keys}
    params = [_sampled(index, num_tokens) if sampled else greedy(num_tokens) for index in range(len(prompts))]
    expected = complete_alone(name_or_path, prompts, params, keys)
    for name in ways if ways is not None else [name for name in WAYS if name not in WAYS_ON_REQUEST]:
        assert_way_agrees(name, name_or_path, prompts, params, keys, expected)


def assert_way_agrees(
    name: str,
    name_or_path: str,
    prompts: list[Tokens],
    params: list[SamplingParams],
    keys: dict[str, Any],
    expected: list[Tokens],
) -> None:
    """Complete prompts in one way and compare with what `complete_alone` gave.

    Raises:
        AssertionError: as `assert_ways_agree`.
    """
    found = WAYS[name](name_or_path, prompts, params, keys)
    for index, (ours, alone) in enumerate(zip(found, expected, strict=True)):
        if ours != alone:
            step = next((i for i, (a, b) in enumerate(zip(ours, alone, strict=False)) if a != b), len(ours))
            raise AssertionError(
                f"{name}: prompt {index} of {len(prompts[index])} tokens differs from token {step} on: "
                f"{ours[step : step + 8]}, alone in a fresh engine {alone[step : step + 8]}"
            )


def complete_alone(
    name_or_path: str, prompts: list[Tokens], params: list[SamplingParams], keys: dict[str, Any]
) -> list[Tokens]:
    """Each prompt in an engine that nobody has used before, without graphs, in one chunk."""
    completions = []
    for prompt, param in zip(prompts, params, strict=True):
        with way_engine(name_or_path, [prompt], [param], keys, enforce_eager=True) as engine:
            completions += engine.generate([prompt], param)["token_ids"]
    return completions


def way_engine(
    name_or_path: str, prompts: list[Tokens], params: list[SamplingParams], keys: dict[str, Any], **changes: Any
) -> LLMEngine:
    """An engine with room for all prompts at once, unless `changes` say otherwise."""
    return LLMEngine(name_or_path, **way_keys(prompts, params, {**keys, **changes}))


def way_keys(prompts: list[Tokens], params: list[SamplingParams], keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of such an engine."""
    lengths = _lengths(prompts, params)
    sized = {
        "block_size": BLOCK_SIZE,
        "max_num_sequences": len(prompts),
        "max_model_length": max(lengths),
        "max_num_batched_tokens": sum(lengths),
        "max_cached_blocks": sum(-(-length // BLOCK_SIZE) for length in lengths) + len(prompts),
    }
    return {**sized, **keys}


def _way(**changes: Any) -> Way:
    """All prompts in one call of an engine with these keys changed."""

    def way(
        name_or_path: str, prompts: list[Tokens], params: list[SamplingParams], keys: dict[str, Any]
    ) -> list[Tokens]:
        with way_engine(name_or_path, prompts, params, keys, **changes) as engine:
            return engine.generate(prompts, params)["token_ids"]

    return way


register_way("all in one batch")(_way())
register_way("all in one batch, eager")(_way(enforce_eager=True))
for _size in (1, 7, 64, 256):
    register_way(f"chunks of {_size}")(_way(max_num_batched_tokens=_size))
register_way("blocks of 1")(_way(block_size=1, max_cached_blocks=None))
register_way("two ranks", on_request=True)(_way(world_size=2))


@register_way("one after another in one engine")
def _one_after_another(
    name_or_path: str, prompts: list[Tokens], params: list[SamplingParams], keys: dict[str, Any]
) -> list[Tokens]:
    with way_engine(name_or_path, prompts, params, keys) as engine:
        return [engine.generate([prompt], param)["token_ids"][0] for prompt, param in zip(prompts, params, strict=True)]


def _joining(**changes: Any) -> Way:
    """Each prompt a step after the one before it, in an engine with these keys changed."""

    def way(
        name_or_path: str, prompts: list[Tokens], params: list[SamplingParams], keys: dict[str, Any]
    ) -> list[Tokens]:
        with way_engine(name_or_path, prompts, params, keys, **changes) as engine:
            seq_ids, outputs = [], []
            for prompt, param in zip(prompts, params, strict=True):
                seq_ids.append(engine.add_prompt(prompt, param))
                outputs += engine.step()[0]
            while not engine.scheduler.is_finished():
                outputs += engine.step()[0]
        found = {output.seq_id: output.token_ids for output in outputs}
        return [found[seq_id] for seq_id in seq_ids]

    return way


register_way("joining at every step")(_joining())
# Without graphs decode rows and chunks go through the model in one pass.
register_way("joining in chunks of 5, eager")(_joining(max_prefill_tokens_beside_decode=5, enforce_eager=True))
register_way("two ranks, joining in chunks of 5", on_request=True)(
    _joining(world_size=2, max_prefill_tokens_beside_decode=5)
)


@register_way("streamed")
def _streamed(
    name_or_path: str, prompts: list[Tokens], params: list[SamplingParams], keys: dict[str, Any]
) -> list[Tokens]:
    return _stream(name_or_path, prompts, params, keys)


@register_way("streamed, with a stop string that never comes")
def _streamed_with_stop_string(
    name_or_path: str, prompts: list[Tokens], params: list[SamplingParams], keys: dict[str, Any]
) -> list[Tokens]:
    return _stream(name_or_path, prompts, params, keys, stop=("never" * 20,))


def _stream(
    name_or_path: str,
    prompts: list[Tokens],
    params: list[SamplingParams],
    keys: dict[str, Any],
    stop: tuple[str, ...] = (),
) -> list[Tokens]:
    completions: list[Tokens] = [[] for _ in prompts]
    texts = [""] * len(prompts)
    with way_engine(name_or_path, prompts, params, keys) as engine:
        if engine.tokenizer is not None:  # without one there are no texts to stop at
            params = [dataclasses.replace(param, stop=stop) for param in params]
        for piece in engine.stream(prompts, params):
            completions[piece.index] += piece.token_ids
            texts[piece.index] += piece.text
        whole = engine.generate(prompts, params)["text"]
    for index, (joined, text) in enumerate(zip(texts, whole, strict=True)):
        if joined != text:
            raise AssertionError(f"streamed: the pieces of prompt {index} join to {joined!r}, and the text is {text!r}")
    return completions


@register_way("asynchronous")
def _asynchronous(
    name_or_path: str, prompts: list[Tokens], params: list[SamplingParams], keys: dict[str, Any]
) -> list[Tokens]:
    async def complete(engine: AsyncLLMEngine, prompt: Tokens, param: SamplingParams) -> Tokens:
        return [token async for piece in engine.generate(prompt, param) for token in piece.token_ids]

    async def complete_all() -> list[Tokens]:
        async with AsyncLLMEngine(name_or_path, **way_keys(prompts, params, keys)) as engine:
            pairs = zip(prompts, params, strict=True)
            return await asyncio.gather(*(complete(engine, prompt, param) for prompt, param in pairs))

    return asyncio.run(complete_all())


@register_way("prefix cache")
def _cached(
    name_or_path: str, prompts: list[Tokens], params: list[SamplingParams], keys: dict[str, Any]
) -> list[Tokens]:
    with way_engine(name_or_path, prompts, params, keys) as engine:
        engine.generate(prompts, params)
        again = engine.generate(prompts, params)
    hits = sum(usage["cached_tokens"] for usage in again["usage"])
    if not hits and any(len(prompt) > BLOCK_SIZE for prompt in prompts):
        raise AssertionError("prefix cache: the same prompts sent again found nothing in the cache")
    return again["token_ids"]


@register_way("preempted")
def _preempted(
    name_or_path: str, prompts: list[Tokens], params: list[SamplingParams], keys: dict[str, Any]
) -> list[Tokens]:
    blocks = -(-max(_lengths(prompts, params)) // BLOCK_SIZE) + 1
    with way_engine(name_or_path, prompts, params, keys, max_cached_blocks=blocks) as engine:
        completions = engine.generate(prompts, params)["token_ids"]
        if not engine.stats()["preemptions"]:
            raise AssertionError(f"preempted: a pool of {blocks} blocks preempted nobody; give more or longer prompts")
    return completions


@register_way("interpreted kernels", on_request=True)
def interpreted_kernels(
    name_or_path: str, prompts: list[Tokens], params: list[SamplingParams], keys: dict[str, Any]
) -> list[Tokens]:
    """The kernels' own code on a CPU, in a process of its own; for two layers and a few tokens, since it is slow."""
    spec = keys.get("spec")
    asked = {
        "name": name_or_path,
        "prompts": prompts,
        "params": [vars(param) for param in params],
        "keys": {**keys, "device": "cpu", "dtype": "float32", "spec": spec and dataclasses.asdict(spec)},
    }
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    run = [sys.executable, "-m", "tritonllm.testing.interpreted"]
    done = subprocess.run(run, input=json.dumps(asked), env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"interpreted kernels: the process failed: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _lengths(prompts: list[Tokens], params: list[SamplingParams]) -> list[int]:
    return [len(prompt) + (param.max_tokens or 0) for prompt, param in zip(prompts, params, strict=True)]


def greedy(num_tokens: int) -> SamplingParams:
    """Greedily, exactly this many tokens."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def _sampled(index: int, num_tokens: int) -> SamplingParams:
    top_p, top_k = [(1.0, 0), (0.9, 0), (1.0, 20), (0.8, 50)][index % 4]
    return SamplingParams(temperature=0.8, top_p=top_p, top_k=top_k, seed=index, max_tokens=num_tokens, ignore_eos=True)
