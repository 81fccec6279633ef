"""Where the time of a whole workload goes: every step between two CUDA events, by how many rows decode in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tritonllm.bench.timing import rounded
from tritonllm.engine.plan import StepPlan
from tritonllm.errors import EngineError

if TYPE_CHECKING:
    from tritonllm.engine.llm_engine import LLMEngine

_ROWS = 32  # of a line of the report


class Step(NamedTuple):
    """One launched step: what it holds, when the host launched it, and events before and after it on the device."""

    num_rows: int
    has_prompts: bool
    launched: float
    before: Any
    after: Any


def require_events(llm: LLMEngine) -> None:
    """Raise `EngineError` if the engine runs on a CPU, which has no events."""
    if llm.config.device != "cuda":
        raise EngineError("a workload can be profiled on a GPU alone: events of the device tell its steps apart.")


@contextmanager
def timed_steps(llm: LLMEngine) -> Iterator[list[Step]]:
    """Every step that an engine launches inside, in order; those of other ranks are not looked at.

    Raises:
        EngineError: the engine runs on a CPU, which has no events.
    """
    import torch

    require_events(llm)
    steps: list[Step] = []
    runner = llm.runner
    launch = runner.launch

    def launch_between_events(plan: StepPlan) -> None:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        launched = time.perf_counter()
        before.record()
        launch(plan)
        after.record()
        steps.append(Step(plan.num_decode_rows, bool(plan.chunks), launched, before, after))

    runner.launch = launch_between_events  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del runner.launch


def workload_profile(steps: list[Step], started: float, seconds: float) -> dict[str, Any]:
    """What steps that have ended say about a workload of so many `seconds` that began at `started` by the host's clock.

    Returns:
        `before_first_launch_ms`; `until_last_prompt_ms`, on the device; `between_steps_ms`, in which the device had
        nothing to do; `after_last_step_ms`, that the host needed to end; `decode`, a line for every 32 decode rows of
        steps without prompts: `rows` at most, `steps`, `ms_per_step` with the time before it, and `ms` of all.
    """
    first, last = steps[0], steps[-1]
    on_device = first.before.elapsed_time(last.after)
    before_first = 1e3 * (first.launched - started)
    gaps = [a.after.elapsed_time(b.before) for a, b in zip(steps, steps[1:], strict=False)]
    with_prompts = [index for index, step in enumerate(steps) if step.has_prompts]
    lines: dict[int, list[float]] = {}
    for index, step in enumerate(steps):
        if index and not step.has_prompts:
            rows = -(-step.num_rows // _ROWS) * _ROWS
            lines.setdefault(rows, []).append(steps[index - 1].after.elapsed_time(step.after))
    last_prompt = first.before.elapsed_time(steps[with_prompts[-1]].after) if with_prompts else None
    return {
        "before_first_launch_ms": round(before_first, 1),
        "until_last_prompt_ms": rounded(last_prompt, 1),
        "between_steps_ms": round(sum(gaps), 1),
        "after_last_step_ms": round(1e3 * seconds - before_first - on_device, 1),
        "decode": [
            {"rows": rows, "steps": len(ms), "ms_per_step": round(sum(ms) / len(ms), 3), "ms": round(sum(ms), 1)}
            for rows, ms in sorted(lines.items())
        ],
    }
