"""The life of ranks: failures in every phase reach rank 0 in seconds, and nothing is left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from failing_models import BAD_TOKEN

from tritonllm import EngineConfig, LLMEngine, ModelRunner, SamplingParams
from tritonllm.engine import ranks
from tritonllm.engine.plan import StepPlan
from tritonllm.engine.rank_calls import encode_call
from tritonllm.engine.resolve import resolve_model
from tritonllm.errors import CheckpointError, ConfigError, EngineError
from tritonllm.models.collectives import DistributedGroup

SIZES = {
    "load_format": "dummy",
    "device": "cpu",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 1,
    "num_heads": 6,
    "num_kv_heads": 6,
    "head_dim": 8,
    "block_size": 8,
    "max_model_length": 64,
    "max_num_sequences": 4,
}
CONFIG = EngineConfig("Llama-3.2-1B", world_size=2, **SIZES)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def segments() -> set[str]:
    """Shared memory and semaphores of this host."""
    return set(os.listdir("/dev/shm"))


def leftovers(before: set[str]) -> set[str]:
    """Segments that are new and that no other program on this host has in its memory."""
    inodes = {}
    for name in segments() - before:
        with contextlib.suppress(OSError):
            inodes[str(os.stat(f"/dev/shm/{name}").st_ino)] = name
    for maps in Path("/proc").glob("[0-9]*/maps") if inodes else ():
        if maps.parent.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                for line in maps.read_text().splitlines():
                    fields = line.split(maxsplit=5)  # the name may be that of a time before a renaming
                    if len(fields) == 6 and fields[5].startswith("/dev/shm/"):
                        inodes.pop(fields[4], None)
    return set(inodes.values()) & segments()


@pytest.fixture(autouse=True)
def nothing_is_left(_one_thread) -> Iterator[None]:
    """Every test here ends without processes and without shared memory of its own."""
    before = segments()
    yield
    deadline = time.monotonic() + 5
    while (multiprocessing.active_children() or leftovers(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert multiprocessing.active_children() == []
    assert leftovers(before) == set()


def within_five_seconds(call: Callable[[], object], match: str) -> str:
    """The message of the EngineError that a call raises."""
    start = time.monotonic()
    with pytest.raises(EngineError, match=match) as caught:
        call()
    assert time.monotonic() - start < 5
    return str(caught.value)


def runner_of(model: str) -> ModelRunner:
    resolved = resolve_model(CONFIG)
    return ModelRunner(CONFIG, resolved=replace(resolved, spec=replace(resolved.spec, model=model)))


def test_calls_of_any_size_and_two_engines_at_once() -> None:
    expected = LLMEngine(CONFIG.replace(world_size=1)).generate([[3, 4, 5]], GREEDY)["token_ids"]
    with LLMEngine(CONFIG) as one, LLMEngine(CONFIG) as other:
        assert len(multiprocessing.active_children()) == 2
        one.runner.call("launch", StepPlan(zero_blocks=[0] * 1_000_000))
        one.runner.collect()
        for engine in (one, other, one):
            assert engine.generate([[3, 4, 5]], GREEDY)["token_ids"] == expected
        with pytest.raises(EngineError, match=r"loop\(\) runs on the ranks"):
            one.runner.loop()
    one.exit()
    one.runner.call("exit")
    assert multiprocessing.active_children() == []


def test_most_steps_are_sent_as_a_record_of_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def measured(method: str, args: tuple) -> bytes:
        data = encode_call(method, args)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(ranks, "encode_call", measured)
    with LLMEngine(CONFIG) as engine:
        engine.generate([[3, 4, 5]], GREEDY)
    # A prompt, a row that is new, three blocks of eight tokens, the end; the other steps change nothing.
    assert sizes.count(7) >= 15
    assert sum(size > 7 for size in sizes) <= 6


@pytest.mark.parametrize("stuck", [False, True])
def test_graphs_go_before_the_group_which_nobody_waits_for_long(monkeypatch: pytest.MonkeyPatch, stuck: bool) -> None:
    """NCCL, asked to abort, first waits until no graph holds its collectives."""
    dropped = threading.Event()

    def close(group: DistributedGroup, failed: bool = False) -> None:
        assert failed
        dropped.wait(60)

    runner = ModelRunner(CONFIG)
    monkeypatch.setattr(DistributedGroup, "close", close)
    if not stuck:
        monkeypatch.setattr(runner.graphs, "reset", dropped.set)
    (process,) = multiprocessing.active_children()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    within_five_seconds(lambda: runner.call("launch", StepPlan()), "rank 1 of 2 ended with exit code -9")
    assert dropped.is_set() is not stuck
    dropped.set()


def test_a_rank_that_is_killed_ends_the_engine() -> None:
    engine = LLMEngine(CONFIG.replace(world_size=3))
    engine.add_prompt([3, 4, 5], GREEDY)
    engine.step()
    engine.step()
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    def go_on() -> None:
        while True:
            engine.step()

    within_five_seconds(go_on, r"rank \d of 3 ended with exit code -9")
    assert multiprocessing.active_children() == []
    within_five_seconds(engine.step, "the engine failed in the middle of a step")
    engine.exit()
    engine.exit()


def test_an_idle_engine_notices_too() -> None:
    runner = ModelRunner(CONFIG)
    (process,) = multiprocessing.active_children()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    within_five_seconds(lambda: runner.call("launch", StepPlan()), "rank 1 of 2 ended with exit code -9")
    within_five_seconds(lambda: runner.call("launch", StepPlan()), "the other ranks have ended")
    runner.exit()


def test_an_error_in_a_step_is_raised_with_its_traceback() -> None:
    runner = runner_of("failing_models:FailsInStep")
    good, bad = (StepPlan(chunks=[chunk_of(token)]) for token in (5, BAD_TOKEN))
    runner.call("launch", good)
    runner.collect()
    message = within_five_seconds(lambda: runner.call("launch", bad), "rank 1 of 2 failed")
    assert "failing_models.py" in message
    assert message.rstrip().endswith("RuntimeError: this rank cannot go on")
    runner.exit()


def chunk_of(token: int):
    from tritonllm.engine.plan import PrefillChunk
    from tritonllm.engine.sequence import RowSampling

    return PrefillChunk([token], 0, [0], True, RowSampling(0.0, 0, 1.0, 0))


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("failing_models:FailsToLoad", "RuntimeError: this rank cannot load"),
        pytest.param("fails_in_ranks:Model", "ImportError: not in this process", marks=pytest.mark.slow),
    ],
)
def test_an_error_before_the_first_step_too(model: str, error: str) -> None:
    with pytest.raises(EngineError, match=error):
        runner_of(model)


@pytest.mark.slow
def test_rank_0_does_not_finish_loading_first() -> None:
    start = time.monotonic()
    with pytest.raises(EngineError, match="RuntimeError: this rank cannot load"):
        runner_of("failing_models:FailsWhileRank0Loads")
    assert time.monotonic() - start < 15  # the whole start


@pytest.mark.slow
def test_an_error_of_every_rank_is_raised_as_it_is(tmp_path: Path) -> None:
    from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

    save_tiny_checkpoint(tiny_hf_config("llama"), tmp_path / "tiny", tokenizer=False)
    (tmp_path / "tiny" / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(CheckpointError, match="is not a readable safetensors file"):
        LLMEngine(str(tmp_path / "tiny"), world_size=2, device="cpu", block_size=16)


def test_what_cannot_be_split_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    with pytest.raises(ConfigError, match="world_size=4 does not fit this model: .* use one of 1, 2, 3, 6"):
        LLMEngine(CONFIG.replace(world_size=4))


SCRIPT = """
import sys
from tritonllm import LLMEngine, SamplingParams

def main():
    engine = LLMEngine("Llama-3.2-1B", world_size=2, **SIZES)
    print("ready", flush=True)
    BODY
"""


def run_script(tmp_path: Path, body: str, guard: bool = True) -> subprocess.Popen:
    file = tmp_path / "script.py"
    file.write_text(
        SCRIPT.replace("SIZES", repr(SIZES)).replace("BODY", body)
        + ('if __name__ == "__main__":\n    main()\n' if guard else "main()\n")
    )
    return subprocess.Popen(
        [sys.executable, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def group_is_gone(process: subprocess.Popen, seconds: float = 10) -> bool:
    """Whether no process of a script's session is left."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_script_without_a_main_guard_gets_one_error(tmp_path: Path) -> None:
    process = run_script(tmp_path, "pass", guard=False)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ready" not in out
    assert err.count("has no main guard") == 1
    assert err.count("Traceback") <= 2  # the error and what it came from, of rank 0 alone
    assert err.rstrip().splitlines()[-1].startswith("tritonllm.errors.EngineError: the script that makes this engine")
    assert group_is_gone(process)


FOREVER = "while True: engine.generate([[1, 2]], SamplingParams(max_tokens=50, ignore_eos=True))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "number"),
    [
        ("pass", None),  # the end of the interpreter, without exit()
        (FOREVER, signal.SIGINT),
        (FOREVER, signal.SIGKILL),
    ],
)
def test_nothing_outlives_the_script(tmp_path: Path, body: str, number: int | None) -> None:
    process = run_script(tmp_path, body)
    assert process.stdout.readline() == "ready\n"
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    elif number is not None:
        time.sleep(0.3)
        os.kill(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert group_is_gone(process)
    if number is None:
        assert (process.returncode, err) == (0, "")
    elif number == signal.SIGINT:
        assert err.count("\nKeyboardInterrupt") == 1
    else:
        assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.5, 1.5, 2.5, 3.5])
def test_ctrl_c_while_ranks_start(tmp_path: Path, delay: float) -> None:
    process = run_script(tmp_path, "pass")
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert group_is_gone(process)
