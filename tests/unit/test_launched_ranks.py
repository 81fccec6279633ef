"""Ranks that torchrun started, as on two hosts: one rank's tokens, and no failure leaves anybody behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tritonllm import EngineConfig, LLMEngine, SamplingParams
from tritonllm.engine.launch_place import LaunchPlace, launch_place
from tritonllm.engine.launched_ranks import _received, _sent
from tritonllm.engine.resolve import resolve_model
from tritonllm.errors import CheckpointError, ConfigError, EngineError
from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

LIMITS = {"device": "cpu", "block_size": 8, "max_model_length": 64, "max_num_sequences": 4}
PROMPTS = [[3, 4, 5], list(range(20, 50))]
TOKENS = SamplingParams(temperature=0.7, seed=1, max_tokens=16, ignore_eos=True)

SCRIPT = """
import os
print("process", os.environ["RANK"], os.getpid(), flush=True)
from tritonllm import LLMEngine, SamplingParams
from tritonllm.engine.model_runner import ModelRunner
PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=16, ignore_eos=True)
BEFORE
with LLMEngine(MODEL, world_size=2, **LIMITS) as engine:
    print("ready", flush=True)
    BODY
    print("the end of rank", os.environ["RANK"], flush=True)
"""
FOREVER = "while True: engine.generate(PROMPTS, PARAMS)"
FAILS_IN_STEP = """
def fail(self, plan):
    raise RuntimeError("this rank cannot go on")
if os.environ["RANK"] == "1":
    ModelRunner.launch = fail
"""
FAILS_TO_LOAD = FAILS_IN_STEP.replace("launch", "_make_pool").replace(", plan", "")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Start:
    """Two processes that are two hosts to each other, each in a session of its own."""

    def __init__(self, folder: Path, model: str, body: str, before: str = "", torchrun: bool = False) -> None:
        script = folder / "script.py"
        text = SCRIPT.replace("BODY", body).replace("BEFORE", before)
        for name, value in {"MODEL": model, "LIMITS": LIMITS, "PROMPTS": PROMPTS}.items():
            text = text.replace(name, repr(value))
        script.write_text(text)
        port = str(free_port())
        self.hosts = []
        for rank in ("0", "1"):
            command = [sys.executable, str(script)]
            place = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if torchrun:
                place = {}
                options = ["--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1"]
                options += ["--master-addr=127.0.0.1", f"--master-port={port}"]
                command = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
            self.hosts.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                    env={**os.environ, **place, "OMP_NUM_THREADS": "1"},
                )
            )

    def line(self, host: int) -> str:
        return self.hosts[host].stdout.readline().rstrip("\n")

    def process_id(self, host: int) -> int:
        kind, rank, process_id = self.line(host).split()
        assert (kind, rank) == ("process", str(host))
        return int(process_id)

    def ended(self, seconds: float = 30) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of both hosts, with nothing left of either."""
        results = []
        for host in self.hosts:
            out, err = host.communicate(timeout=seconds)
            results.append((host.returncode, out, err))
        for host in self.hosts:
            with pytest.raises(ProcessLookupError):
                os.killpg(host.pid, 0)
        return results


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    """`start(body, ...)`, whose processes do not outlive the test."""
    save_tiny_checkpoint(tiny_hf_config("llama"), tmp_path / "tiny", tokenizer=False)
    starts = []

    def begin(body: str, **keys) -> Start:
        starts.append(Start(tmp_path, str(tmp_path / "tiny"), body, **keys))
        return starts[-1]

    yield begin
    for one in starts:
        for host in one.hosts:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGKILL)
            host.wait()
            host.stdout.close()
            host.stderr.close()


@pytest.mark.usefixtures("_one_thread")
def test_two_hosts_under_torchrun_give_the_tokens_of_one_rank(start, tmp_path: Path) -> None:
    two = start("print(engine.generate(PROMPTS, PARAMS)['token_ids'])", torchrun=True)
    with LLMEngine(str(tmp_path / "tiny"), **LIMITS) as engine:
        expected = engine.generate(PROMPTS, TOKENS)["token_ids"]
    (code, out, _), (other_code, other_out, _) = two.ended(60)
    assert (code, other_code) == (0, 0)
    assert out.splitlines()[1:] == ["ready", str(expected), "the end of rank 0"]
    assert len(other_out.splitlines()) == 1  # what comes after the engine is for rank 0 alone


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_ends_the_engine(start, torchrun: bool) -> None:
    two = start(FOREVER, torchrun=torchrun)
    two.process_id(0)
    victim = two.process_id(1)
    assert two.line(0) == "ready"
    time.sleep(0.3)
    os.kill(victim, signal.SIGKILL)
    begin = time.monotonic()
    if not torchrun:  # which looks after a process only now and then
        two.hosts[0].wait(5)
    (code, out, err), (other_code, _, _) = two.ended()
    assert time.monotonic() - begin < (20 if torchrun else 5)
    assert code == 1
    assert other_code in (1, -signal.SIGKILL)
    assert "the end" not in out
    assert "EngineError: rank 1 of 2 ended without a word, or its host is gone" in err


@pytest.mark.parametrize(
    "before", [pytest.param(FAILS_TO_LOAD, id="load", marks=pytest.mark.slow), pytest.param(FAILS_IN_STEP, id="step")]
)
def test_an_error_of_a_rank_is_raised_on_rank_0_with_its_traceback(start, before: str) -> None:
    two = start("engine.generate(PROMPTS, PARAMS)", before=before)
    (code, out, err), (other_code, _, other_err) = two.ended()
    assert (code, other_code) == (1, 1)
    assert ("ready" in out) == (before == FAILS_IN_STEP)
    for text in (err, other_err):
        assert "RuntimeError: this rank cannot go on" in text
    assert "EngineError: rank 1 of 2 failed; make a new engine." in err


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_ranks_end_with_rank_0(start, number: int) -> None:
    two = start(FOREVER)
    two.process_id(0)
    assert two.line(0) == "ready"
    for host in two.hosts[: 1 if number == signal.SIGKILL else 2]:  # a terminal sends Ctrl-C to all
        host.send_signal(number)
    (code, _, err), (other_code, _, other_err) = two.ended(10)
    if number == signal.SIGKILL:
        assert (code, other_code) == (-signal.SIGKILL, 1)
        assert "rank 1 of 2" in other_err
    else:
        assert err.count("\nKeyboardInterrupt") == 1
        assert (other_code, other_err) == (0, "")


@pytest.mark.slow
def test_a_start_serves_one_engine(start) -> None:
    two = start("engine.exit(); LLMEngine(MODEL, world_size=2, **LIMITS)", torchrun=True)
    (code, _, err), _ = two.ended()
    assert code == 1
    assert "EngineError: the other ranks of this start have ended with its first engine" in err


PLACE = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "a-host", "MASTER_PORT": "1234"}


def test_the_place_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PLACE, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launch_place(8) is None
    for name, value in PLACE.items():
        assert launch_place(8) is None
        monkeypatch.setenv(name, value)
    assert launch_place(8) == LaunchPlace(5, 8, 0, 1, "a-host")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert launch_place(8) == LaunchPlace(5, 8, 1, 4, "a-host")
    assert launch_place(1) is None  # processes started together, each with an engine of its own
    with pytest.raises(ConfigError, match=r"world_size=4, but WORLD_SIZE=8 processes"):
        launch_place(4)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK='first', which is no number"):
        launch_place(8)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launch_place(8) is None


def test_only_rank_0_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from tritonllm import ModelRunner

    for name, value in {**PLACE, "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    config = EngineConfig("Qwen3-0.6B", load_format="dummy", world_size=2, **LIMITS)
    with pytest.raises(EngineError, match="only rank 0 of 2 calls the others"):
        ModelRunner(config)


def test_a_checkpoint_is_each_host_s_own_but_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    save_tiny_checkpoint(tiny_hf_config("llama"), folder, tokenizer=False)
    resolved = resolve_model(EngineConfig(str(folder), **LIMITS))
    message = pickle.dumps(_sent(resolved))
    received = _received(message)
    assert received.config == resolved.config
    assert received.checkpoint is not None
    assert received.checkpoint.path == folder
    save_tiny_checkpoint(tiny_hf_config("llama", vocab_size=300), folder, tokenizer=False)
    with pytest.raises(CheckpointError, match=r"tiny is another checkpoint here .* config\.json differ"):
        _received(message)
