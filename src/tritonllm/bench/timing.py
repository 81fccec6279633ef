"""What the benchmarks of an engine share: random prompts, a timed call whose outputs are checked, medians."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tritonllm.bench.limits import Limits, find_rates
from tritonllm.config import EngineConfig
from tritonllm.errors import EngineError
from tritonllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tritonllm.engine.llm_engine import LLMEngine

TOKEN_IDS = 10001
"""Random prompts hold ids below this, or below the vocabulary's size where that is smaller."""


class Bench:
    """An engine under measurement. A context manager that closes it.

    Args:
        config: of the engine.
        memory_rate, matrix_rate: of one device, for the floors, as in `find_rates`; the ranks' add up.

    Attributes:
        llm: the engine, which has answered one request already.
        start_seconds: how long making it took, imports of torch included if this was the first use.
        limits: its floors.
        sampling: how tokens are chosen, greedily unless it is set; a form that it asks for must let outputs go on for
            ever.
    """

    def __init__(self, config: EngineConfig, memory_rate: float | None, matrix_rate: float | None) -> None:
        self.sampling = SamplingParams(temperature=0.0)
        start = time.perf_counter()
        from tritonllm import LLMEngine

        self.llm: LLMEngine = LLMEngine(config)
        self.start_seconds = time.perf_counter() - start
        try:
            decided = self.llm.config
            rates = find_rates(device_name(decided.device), decided.dtype, memory_rate, matrix_rate)
            rates = rates and rates.together(decided.world_size)
            self.limits = Limits(self.llm.model_config, decided.dtype, rates)
            self._rng = random.Random(0)
            self.timed(self.prompts(1, 3), 1)
        except BaseException:
            self.llm.exit()
            raise

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.exit()

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Random prompts, other ones at each call, so that the prefix cache holds none of them."""
        highest = min(TOKEN_IDS, self.llm.model_config.vocab_size) - 1
        return [[self._rng.randint(0, highest) for _ in range(length)] for _ in range(count)]

    def timed(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Seconds of one `generate` whose outputs do not end before."""
        form = self.sampling.structured_outputs  # has a say in where an output may end
        params = replace(
            self.sampling, max_tokens=max_tokens, ignore_eos=form is None, min_tokens=0 if form is None else max_tokens
        )
        return timed_generate(self.llm, prompts, [params] * len(prompts))


def timed_generate(llm: LLMEngine, prompts: list[list[int]], params: Sequence[SamplingParams]) -> float:
    """Seconds of one `generate`.

    Raises:
        EngineError: an output does not have the length that was asked for.
    """
    start = time.perf_counter()
    result = llm.generate(prompts, list(params))
    seconds = time.perf_counter() - start
    for index, (tokens, asked) in enumerate(zip(result["token_ids"], params, strict=True)):
        if len(tokens) != asked.max_tokens:
            why = result["errors"][index] or f"finish reason {result['finish_reason'][index]!r}"
            raise EngineError(
                f"output {index} has {len(tokens)} tokens and not the {asked.max_tokens} that were asked for: {why}."
            )
    return seconds


def median_run(runs: Sequence[Mapping[str, Any]], key: str) -> Mapping[str, Any]:
    """The run in the middle by that key; of an even number the slower of the two."""
    return sorted(runs, key=lambda run: run[key])[len(runs) // 2]


def device_name(device: str) -> str | None:
    """What torch calls the GPU, None for a CPU."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else None


def rounded(value: float | None, digits: int) -> float | None:
    """A number for a report, or none."""
    return None if value is None else round(value, digits)
