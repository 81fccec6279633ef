"""What fails inside a step stops the engine for good, and says so; what fails before it changes nothing."""

from __future__ import annotations

import pytest

from tritonllm import SamplingParams
from tritonllm.errors import EngineError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class OutOfMemory(RuntimeError):
    pass


def fail_at(engine, method: str, call: int) -> None:
    """Make the device fail in one call of `launch` or `collect`, counted from 0."""
    works = getattr(engine.runner, method)
    calls = iter(range(call + 1))

    def failing(*args):
        if next(calls, call) == call:
            raise OutOfMemory("CUDA out of memory. Tried to allocate 2.00 GiB")
        return works(*args)

    setattr(engine.runner, method, failing)


@pytest.mark.parametrize("call", [0, 1, 3])
@pytest.mark.parametrize("method", ["launch", "collect"])
def test_later_calls_name_the_first_error_and_exit_works(engine, method: str, call: int) -> None:
    seq_id = engine.add_prompt([5, 6], GREEDY)
    fail_at(engine, method, call)
    with pytest.raises(
        EngineError, match=r"failed in the middle of a step .*OutOfMemory: CUDA out of memory"
    ) as caught:
        engine.generate([[7], [8] * 20], GREEDY)
    assert isinstance(caught.value.__cause__, OutOfMemory)
    for use in (
        lambda: engine.generate([[3]], GREEDY),
        lambda: engine.stream([[3]], GREEDY),
        lambda: engine.add_prompt([3], GREEDY),
        lambda: engine.abort(seq_id),
        lambda: engine.step(),
    ):
        with pytest.raises(EngineError, match=r"call exit\(\) and make a new one \(OutOfMemory"):
            use()
    assert engine.stats()["requests"] == 3
    engine.exit()
    engine.exit()
    with pytest.raises(EngineError, match=r"closed by exit\(\)"):
        engine.step()


def test_step_and_stream_fail_alike(make_engine) -> None:
    for use in (lambda engine: engine.step(), lambda engine: list(engine.stream([[7]], GREEDY))):
        engine = make_engine()
        engine.add_prompt([5, 6], GREEDY)
        fail_at(engine, "launch", 0)
        with pytest.raises(EngineError, match="OutOfMemory"):
            use(engine)
        with pytest.raises(EngineError, match="OutOfMemory"):
            use(engine)


def test_an_open_stream_ends_with_the_error_of_another_call(engine) -> None:
    stream = engine.stream([[5, 6]], GREEDY)
    next(stream)
    fail_at(engine, "launch", 0)
    with pytest.raises(EngineError, match="OutOfMemory"):
        engine.step()
    with pytest.raises(EngineError, match="OutOfMemory"):
        next(stream)


def test_another_engine_is_not_concerned(make_engine) -> None:
    broken, other = make_engine(), make_engine()
    expected = other.generate([[5, 6]], GREEDY)
    fail_at(broken, "collect", 0)
    with pytest.raises(EngineError):
        broken.generate([[5, 6]], GREEDY)
    broken.exit()
    assert other.generate([[5, 6]], GREEDY)["token_ids"] == expected["token_ids"]


def test_a_failure_before_the_step_leaves_the_engine_as_it_was(engine, monkeypatch) -> None:
    seq_id = engine.add_prompt([5, 6], GREEDY)
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate([[3], "text"], GREEDY)
    assert engine.stats()["requests"] == 1
    outputs = []
    while not engine.scheduler.is_finished():
        outputs += engine.step()[0]
    assert [output.seq_id for output in outputs] == [seq_id]


def test_a_scheduler_with_requests_and_nothing_to_run_says_what_it_has(engine) -> None:
    """Instead of spinning: the state that explains it stands in the message."""
    engine.scheduler.block_manager.can_allocate = lambda seq, reserve=0: False
    with pytest.raises(EngineError) as caught:
        engine.generate([[5] * 20, [6]], GREEDY)
    for fact in (
        "nothing can run although requests are left",
        "2 waiting, 0 in their prompt, 0 running, the longest of 20 tokens",
        "24 of 24 blocks of 16 free",
        "at most 64 tokens and 4 sequences a step",
        "0 steps in flight",
    ):
        assert fact in str(caught.value)
