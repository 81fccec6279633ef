"""Where the time of a workload goes, from events around its steps; a clock of its own stands in for the GPU."""

from __future__ import annotations

import copy

import pytest
import torch

from tritonllm import LLMEngine, SamplingParams
from tritonllm.bench.report import as_text, conditions
from tritonllm.bench.throughput import measure
from tritonllm.bench.timing import Bench
from tritonllm.bench.workload_profile import Step, timed_steps, workload_profile
from tritonllm.config import EngineConfig
from tritonllm.errors import EngineError


class Event:
    """An event of a device whose clock ticks once an event."""

    ticks = 0

    def __init__(self, enable_timing: bool = False, at: float = 0.0) -> None:
        assert enable_timing or at
        self.at = at

    def record(self) -> None:
        Event.ticks += 1
        self.at = Event.ticks

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def pretend_gpu(llm: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy.copy(llm.config)
    object.__setattr__(config, "device", "cuda")
    monkeypatch.setattr(llm, "config", config)
    monkeypatch.setattr(torch.cuda, "Event", Event)


def step(rows: int, prompts: bool, launched: float, before: float, after: float) -> Step:
    return Step(rows, prompts, launched, Event(at=before), Event(at=after))


def test_times_add_up_to_the_whole() -> None:
    steps = [step(0, True, 10.5, 1, 101), step(40, True, 10.6, 102, 302), step(64, False, 10.7, 303, 313)]
    steps += [step(33, False, 10.8, 315, 325), step(32, False, 10.9, 325, 326)]
    told = workload_profile(steps, 10.4, 0.43)
    assert told == {
        "before_first_launch_ms": 100.0,
        "until_last_prompt_ms": 301.0,
        "between_steps_ms": 4.0,
        "after_last_step_ms": 5.0,
        "decode": [
            {"rows": 32, "steps": 1, "ms_per_step": 1.0, "ms": 1.0},
            {"rows": 64, "steps": 2, "ms_per_step": 11.5, "ms": 23.0},
        ],
    }
    parts = told["before_first_launch_ms"] + told["until_last_prompt_ms"] + told["after_last_step_ms"]
    assert parts + sum(line["ms"] for line in told["decode"]) == pytest.approx(430)


def test_every_step_of_the_engine_is_seen_and_the_runner_is_as_before(make_engine, monkeypatch) -> None:
    with make_engine() as llm:
        pretend_gpu(llm, monkeypatch)
        before = llm.stats()["steps"]
        with timed_steps(llm) as steps:
            llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert len(steps) == llm.stats()["steps"] - before > 3
        assert "launch" not in vars(llm.runner)
    assert [each.has_prompts for each in steps] == [True] + [False] * (len(steps) - 1)
    assert {each.num_rows for each in steps[1:]} == {2}
    assert all(each.after.at == each.before.at + 1 for each in steps)


def test_a_cpu_is_refused(make_engine) -> None:
    with make_engine() as llm, pytest.raises(EngineError, match="profiled on a GPU alone"), timed_steps(llm):
        pass


def test_a_cpu_is_refused_before_anything_runs(llama: str) -> None:
    sizes = {"max_num_sequences": 2, "max_cached_blocks": 32, "block_size": 16, "max_model_length": 96}
    with Bench(EngineConfig(llama, device="cpu", **sizes), None, None) as bench:
        before = bench.llm.stats()["steps"]
        with pytest.raises(EngineError, match="profiled on a GPU alone"):
            measure(bench, [([1, 2, 3], 5)], 0.0, runs=1, profile=True)
        assert bench.llm.stats()["steps"] == before


def test_the_report_has_a_table_of_it(llama: str, monkeypatch) -> None:
    sizes = {"max_num_sequences": 2, "max_cached_blocks": 32, "block_size": 16, "max_model_length": 96}
    with Bench(EngineConfig(llama, device="cpu", **sizes), None, None) as bench:
        said = {"model": "m", "conditions": conditions(bench.llm)}
        pretend_gpu(bench.llm, monkeypatch)
        told = measure(bench, [([1, 2, 3], 5), ([4, 5], 3)], 0.0, runs=1, profile=True)
    assert sum(line["steps"] for line in told["profile"]["decode"]) == told["steps"] - 1
    text = as_text({"benchmark": "throughput", **said, **told})
    assert "where the time goes  " in text
    assert "up to 32 rows" in text
