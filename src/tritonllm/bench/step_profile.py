"""Where the time of a decode step goes: the GPU's kernels from the profiler, the host's work by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tritonllm.bench.timing import Bench
from tritonllm.errors import EngineError

if TYPE_CHECKING:
    from tritonllm.engine.llm_engine import LLMEngine

FEWEST_OUTPUT_TOKENS = 8
"""Shorter outputs have no middle to look at."""

_MOST_STEPS = 20
_MOST_KERNELS = 20


def profile_steps(bench: Bench, batch: int, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Look at steps in the middle of `output_tokens`, three times over: by the clock, in the profiler, part by part.

    Returns:
        `step_us`, by the clock and without the profiler; `gpu_busy_us` of it, the union of all kernels and copies;
        `gpu_idle_share`, what is left of the step; `kernels` by their time; `host_us`, medians of scheduling, launching
        and reading a step, each on an idle device. The numbers of the GPU are None on a CPU.

    Raises:
        EngineError: requests finish so early that the steps looked at would not hold all of them.
    """
    llm = bench.llm
    steps = min(_MOST_STEPS, output_tokens // FEWEST_OUTPUT_TOKENS)
    params = replace(bench.sampling, max_tokens=output_tokens, ignore_eos=True)
    for prompt in bench.prompts(batch, prompt_tokens):
        llm.add_prompt(prompt, params)
    try:
        while llm.scheduler.waiting or llm.scheduler.prefilling:
            _step(llm)
        for _ in range(output_tokens // 2 - 2 * steps):
            _step(llm)
        step_us = _clock(llm, steps)
        busy_us, kernels = _profile(llm, steps) if llm.config.device == "cuda" else (None, None)
        host_us = _host(llm, steps)
    finally:
        while not llm.scheduler.is_finished():
            llm.step()
    return {
        "steps": steps,
        "step_us": round(step_us, 1),
        "gpu_busy_us": None if busy_us is None else round(busy_us, 1),
        "gpu_idle_share": None if busy_us is None else round(max(0.0, 1 - busy_us / step_us), 3),
        "host_us": host_us,
        "kernels": kernels,
    }


def _step(llm: LLMEngine) -> None:
    outputs, num_tokens, _ = llm.step()
    if outputs or num_tokens == 0:
        raise EngineError(
            "requests finished before the middle of the others was reached: raise --max-num-batched-tokens, so that "
            "their prompts run together, or --output-tokens."
        )


def _synchronize(llm: LLMEngine) -> None:
    if llm.config.device == "cuda":
        import torch

        torch.cuda.synchronize()


def _clock(llm: LLMEngine, steps: int) -> float:
    """Microseconds a step."""
    _synchronize(llm)
    start = time.perf_counter()
    for _ in range(steps):
        _step(llm)
    _synchronize(llm)
    return 1e6 * (time.perf_counter() - start) / steps


def _profile(llm: LLMEngine, steps: int) -> tuple[float, list[dict[str, Any]]]:
    """Microseconds a step in which the GPU was busy, and its kernels, those that take longest first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    _synchronize(llm)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            _step(llm)
        _synchronize(llm)
    spans: list[tuple[float, float]] = []
    times: dict[str, list[float]] = {}
    for event in profiler.events() or []:
        if event.device_type == DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            times.setdefault(event.name, []).append(event.time_range.elapsed_us())
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:_MOST_KERNELS]
    kernels = [
        {
            "name": name,
            "us_per_step": round(sum(durations) / steps, 2),
            "launches_per_step": round(len(durations) / steps, 2),
            "us_per_launch": round(sum(durations) / len(durations), 2),
        }
        for name, durations in longest
    ]
    return covered(spans) / steps, kernels


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals: kernels may run side by side, and a busy GPU is not busier for it."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _host(llm: LLMEngine, steps: int) -> dict[str, float]:
    """Median microseconds of each part of a step that the host does, with nothing left to wait for in between.

    The same three calls as in the engine's own loop, with the clock between them.
    """
    scheduler, runner = llm.scheduler, llm.runner
    parts: dict[str, list[float]] = {"schedule": [], "launch": [], "postprocess": []}
    for _ in range(steps):
        _synchronize(llm)
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        if plan is None:
            raise EngineError("there was no step left to look at: raise --output-tokens.")
        runner.launch(plan)
        launched = time.perf_counter()
        parts["schedule"].append(scheduled - start)
        parts["launch"].append(launched - scheduled)
        if scheduler.num_steps_in_flight > 1:
            _synchronize(llm)
            tokens = runner.collect()
            start = time.perf_counter()
            scheduler.postprocess(tokens)
            parts["postprocess"].append(time.perf_counter() - start)
    return {name: round(1e6 * statistics.median(taken), 1) for name, taken in parts.items() if taken}
