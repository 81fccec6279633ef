"""Abort through the engine, whatever the request is doing: blocks are back within two steps, nobody else notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tritonllm import SamplingParams


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def steps(count: int) -> Callable[[object], None]:
    def run(engine) -> None:
        for _ in range(count):
            engine.step()

    return run


def until_preempted(engine) -> None:
    while not engine.stats()["preemptions"]:
        engine.step()


def until_finished(engine) -> None:
    while not engine.scheduler.is_finished():
        engine.step()


STATES: dict[str, tuple[Callable, int, dict[str, int]]] = {
    "waiting, not one step yet": (steps(0), 64, {"waiting": 2, "running": 0}),
    "in the middle of its prompt, the other waiting": (steps(2), 8, {"waiting": 1, "running": 1}),
    "running, with an unread token": (steps(2), 64, {"waiting": 0, "running": 2}),
    "preempted": (until_preempted, 64, {"waiting": 1, "running": 1}),
    "finished": (until_finished, 64, {"waiting": 0, "running": 0}),
}
"""How to get there, with which budget, and what `stats` says then."""


@pytest.mark.parametrize("state", STATES)
def test_both_requests_are_gone_and_the_pool_is_full_after_two_steps(make_engine, state: str) -> None:
    reach, budget, expected = STATES[state]
    engine = make_engine(max_num_batched_tokens=budget, max_cached_blocks=5)
    seq_ids = [engine.add_prompt([token] * 30, greedy(40)) for token in (5, 6)]
    reach(engine)
    stats = engine.stats()
    assert {name: stats[name] for name in expected} == expected
    finished = state == "finished"
    assert [engine.abort(seq_id) for seq_id in seq_ids] == [not finished] * 2
    assert [engine.abort(seq_id) for seq_id in seq_ids] == [False] * 2
    outputs = [output for _ in range(2) for output in engine.step()[0]]
    assert sorted(output.seq_id for output in outputs) == ([] if finished else seq_ids)
    assert {output.finish_reason for output in outputs} <= {"abort"}
    assert engine.stats()["free_blocks"] == 5
    assert engine.scheduler.is_finished()
    assert not engine.abort(seq_ids[0])


@pytest.mark.parametrize("state", [name for name in STATES if name != "finished"])
def test_the_other_request_gets_its_tokens(make_engine, state: str) -> None:
    alone = make_engine().generate([[5] * 30], greedy(40))["token_ids"][0]
    engine = make_engine(max_num_batched_tokens=STATES[state][1], max_cached_blocks=5)
    first, second = (engine.add_prompt([token] * 30, greedy(40)) for token in (5, 6))
    STATES[state][0](engine)
    assert engine.abort(second)
    outputs = []
    while not engine.scheduler.is_finished():
        outputs += engine.step()[0]
    assert {output.seq_id: output.finish_reason for output in outputs} == {first: "length", second: "abort"}
    assert next(output.token_ids for output in outputs if output.seq_id == first) == alone
