"""A rank that raises or is killed, and Ctrl-C, in each phase of an engine's life: an error in seconds, nothing left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from failing_phases import PHASE, PHASES, WAY
from test_ranks import CONFIG, chunk_of, group_is_gone, nothing_is_left  # noqa: F401

from tritonllm import ModelRunner
from tritonllm.engine.plan import StepPlan
from tritonllm.engine.resolve import resolve_model
from tritonllm.errors import EngineError

NEED_SECONDS = 10


def run_one_step() -> None:
    resolved = resolve_model(CONFIG)
    runner = ModelRunner(CONFIG, resolved=replace(resolved, spec=replace(resolved.spec, model="failing_phases:Model")))
    try:
        runner.call("launch", StepPlan(chunks=[chunk_of(5)]))
        runner.collect()
    finally:
        runner.exit()


MESSAGES = {"raise": r"(?s)rank 1 of 2 failed.*this rank fails: {}", "kill": "rank 1 of 2 ended with exit code -9"}
QUICK = [("import", "raise"), ("load", "kill"), ("warm-up", "raise"), ("step", "kill")]
"""One way in each phase for `make test`; the other one for `make test-full`."""


@pytest.mark.parametrize(
    ("phase", "way"),
    [
        pytest.param(phase, way, marks=() if (phase, way) in QUICK else pytest.mark.slow)
        for phase in PHASES
        for way in MESSAGES
    ],
)
def test_a_failure_of_a_rank(monkeypatch: pytest.MonkeyPatch, phase: str, way: str) -> None:
    monkeypatch.setenv(PHASE, phase)
    monkeypatch.setenv(WAY, way)
    start = time.monotonic()
    with pytest.raises(EngineError, match=MESSAGES[way].format(phase)):
        run_one_step()
    assert time.monotonic() - start < NEED_SECONDS  # with the start of the ranks
    assert multiprocessing.active_children() == []


SCRIPT = """
import sys
if __name__ == "__main__":
    sys.path.insert(0, FOLDER)
    from test_rank_phases import run_one_step  # not before: ranks import this script, and the model with it
    run_one_step()
"""


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=() if phase == "load" else pytest.mark.slow) for phase in PHASES]
)
def test_ctrl_c_while_rank_0_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, phase: str) -> None:
    monkeypatch.setenv(PHASE, phase)
    monkeypatch.setenv(WAY, "pause")
    (tmp_path / "script.py").write_text(SCRIPT.replace("FOLDER", repr(str(Path(__file__).parent))))
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline() == f"reached {phase}\n"
    time.sleep(0.5)  # rank 0 gets to where it waits
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=NEED_SECONDS)
    assert process.returncode != 0
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert group_is_gone(process)
