"""Ctrl-C at any moment: the step under way is finished, requests are dropped whole, and the engine goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from fake_runner import FakeRunner, expected_completion

import tritonllm.engine
from tritonllm import SamplingParams
from tritonllm.errors import EngineError

ENGINE = str(Path(tritonllm.engine.__file__).parent) + os.sep
PROMPTS = [[2, 3, 4], [9] * 20, [7]]
LENGTHS = [5, 2, 7]
STRIDES = [13, pytest.param(1, marks=pytest.mark.slow)]
EXPECTED = [expected_completion(prompt, n) for prompt, n in zip(PROMPTS, LENGTHS, strict=True)]
PARAMS = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, seed=0) for n in LENGTHS]


@pytest.fixture(autouse=True)
def _python_s_own_handler() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and this may be one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def engine(make_engine):
    """An engine whose device is the pretend one, which is quick and checks every plan."""
    engine = make_engine(block_size=4, max_num_sequences=3, max_num_batched_tokens=8, max_cached_blocks=9)
    fake = FakeRunner(3, 9, 4)
    engine.runner.launch, engine.runner.collect = fake.launch, fake.collect
    return engine


def interrupt_at(line: int, call: Callable[[], Any]) -> bool:
    """Run `call` and press Ctrl-C before the n-th line of the engine's own code; whether it came to that line."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: Any):
        nonlocal seen
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return seen >= line


def sweep(call: Callable[[], Any], check: Callable[[bool], None], stride: int) -> int:
    """Interrupt `call` at every `stride`-th line and run `check(interrupted)` after each; returns how often."""
    interruptions, line, reached = 0, 1, True
    while reached:
        try:
            reached, interrupted = interrupt_at(line, call), False
        except KeyboardInterrupt:
            interrupted = True
            interruptions += 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        check(interrupted)
        line += stride
    return interruptions


def assert_idle(engine) -> None:
    assert engine.scheduler.is_finished()
    assert not engine._loop.requests
    assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]
    engine.scheduler.block_manager.check_invariants([])


@pytest.mark.parametrize("stride", STRIDES)
def test_generate_aborts_its_requests_and_the_next_one_is_right(engine, stride: int) -> None:
    rounds = 0

    def check(interrupted: bool) -> None:
        nonlocal rounds
        assert_idle(engine)
        rounds += 1
        if rounds % 10 == 0:
            assert engine.generate(PROMPTS, PARAMS)["token_ids"] == EXPECTED

    assert sweep(lambda: engine.generate(PROMPTS, PARAMS), check, stride) > 100
    assert engine.generate(PROMPTS, PARAMS)["token_ids"] == EXPECTED


@pytest.mark.parametrize("stride", STRIDES)
def test_stream_aborts_its_requests(engine, stride: int) -> None:
    def check(interrupted: bool) -> None:
        assert_idle(engine)

    assert sweep(lambda: list(engine.stream(PROMPTS, PARAMS)), check, stride) > 100
    assert engine.generate(PROMPTS, PARAMS)["token_ids"] == EXPECTED


@pytest.mark.parametrize("stride", STRIDES)
def test_step_and_add_prompt_lose_nothing_and_report_nothing_twice(engine, stride: int) -> None:
    """The caller repeats the call that was interrupted."""
    wanted: list[int] = []
    seq_ids: list[int] = []
    found: dict[int, list[int]] = {}

    def work() -> None:
        while wanted:
            seq_ids.append(engine.add_prompt(PROMPTS[wanted[0]], PARAMS[wanted[0]]))
            wanted.pop(0)
        while not engine.scheduler.is_finished():
            for output in engine.step()[0]:
                assert output.seq_id not in found
                found[output.seq_id] = output.token_ids

    def interrupted_work() -> None:
        wanted[:] = [0, 1, 2]
        seq_ids.clear()
        found.clear()
        work()

    def check(interrupted: bool) -> None:
        if interrupted:
            work()
        assert [found[seq_id] for seq_id in seq_ids] == EXPECTED
        assert_idle(engine)

    assert sweep(interrupted_work, check, stride) > 100


def test_requests_of_others_outlive_an_interrupted_generate(engine) -> None:
    def check(interrupted: bool) -> None:
        seq_id = engine.add_prompt(PROMPTS[0], PARAMS[0])
        engine.step()
        with pytest.raises(KeyboardInterrupt):
            interrupt_at(300, lambda: engine.generate(PROMPTS[1:], PARAMS[1:]))
        outputs = []
        while not engine.scheduler.is_finished():
            outputs += engine.step()[0]
        assert [(output.seq_id, output.token_ids) for output in outputs] == [(seq_id, EXPECTED[0])]
        assert_idle(engine)

    check(False)


def test_ctrl_c_twice_is_ctrl_c_once(engine) -> None:
    """Programs that start others often pass a SIGINT on that the terminal has sent already."""
    launch = engine.runner.launch

    def impatient(plan) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        launch(plan)

    engine.runner.launch = impatient
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    assert_idle(engine)
    engine.runner.launch = launch
    assert engine.generate(PROMPTS, PARAMS)["token_ids"] == EXPECTED


def test_a_handler_of_the_program_s_own_is_left_alone(engine) -> None:
    received = []
    launch = engine.runner.launch

    def pressing(plan) -> None:
        signal.raise_signal(signal.SIGINT)
        launch(plan)

    engine.runner.launch = pressing
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        assert engine.generate(PROMPTS, PARAMS)["token_ids"] == EXPECTED
        assert received
        # One that raises tears the step; the engine then refuses to go on rather than give wrong tokens.
        signal.signal(signal.SIGINT, lambda number, frame: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            engine.generate(PROMPTS, PARAMS)
        with pytest.raises(EngineError, match="failed in the middle of a step"):
            engine.step()
    finally:
        signal.signal(signal.SIGINT, before)


REAL_SIGNALS = """
import os, random, signal, sys, threading, time
from tritonllm import LLMEngine, SamplingParams
import torch

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
engine = LLMEngine(sys.argv[1], device="cpu", block_size=16, max_model_length=96, max_num_sequences=4,
                   max_num_batched_tokens=32, max_cached_blocks=9)
prompts = [[2, 3, 4], [9] * 40, [7], [11] * 17]
params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
expected = engine.generate(prompts, params)["token_ids"]
start = time.perf_counter()
engine.generate(prompts, params)
duration = time.perf_counter() - start
generator = random.Random(0)
interrupted = 0

def press(delay, fired):
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGINT)
    fired.set()

for round_ in range(24):
    fired = threading.Event()
    thread = threading.Thread(target=press, args=(duration * generator.random() ** 2, fired))
    within = False
    try:
        thread.start()
        within = True
        if round_ % 2:
            engine.generate(prompts, params)
        else:
            for _ in engine.stream(prompts, params):
                pass
        within = False
        assert fired.wait(30)
        time.sleep(5)
    except KeyboardInterrupt:
        interrupted += within
    thread.join()
    stats = engine.stats()
    assert engine.scheduler.is_finished(), stats
    assert stats["free_blocks"] == stats["total_blocks"], stats
    if round_ % 5 == 0:
        assert engine.generate(prompts, params)["token_ids"] == expected
assert engine.generate(prompts, params)["token_ids"] == expected
engine.exit()
print(interrupted)
"""


def test_real_signals_at_random_moments(llama) -> None:
    run = [sys.executable, "-c", REAL_SIGNALS, llama]
    done = subprocess.run(run, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 4
