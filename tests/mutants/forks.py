"""Runs of pytest that need not import PyTorch: each is a fork of a process that has done so.

`Forks` is what a caller uses. This file is also that process: it reads a line of JSON a run from its input, arguments,
environment, seconds and the file for what is printed, and answers with a line that holds the exit status.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

PRELOADED = ("pytest", "torch", "transformers.models.llama.modeling_llama")
"""What most tests import and no mutant changes. The last brings Triton, which interprets from the start or never."""


class Forks:
    """Call it for a run; calls of several threads run side by side, each in a process of its own."""

    def __init__(self, folder: Path, python_path: str) -> None:
        self._folder = folder
        # numpy's threads would not be there in a fork.
        self._environment = {**os.environ, "PYTHONPATH": python_path, "OPENBLAS_NUM_THREADS": "1"}
        self._idle: dict[bool, queue.SimpleQueue[subprocess.Popen[str]]] = {
            interpreting: queue.SimpleQueue() for interpreting in (False, True)
        }

    def __call__(
        self, arguments: list[str], environment: dict[str, str], timeout: int, interpreting: bool = False
    ) -> tuple[int, str]:
        """The exit status of `pytest arguments`, negative if a signal ended it, and what it printed.

        Args:
            arguments: of pytest.
            environment: variables that the run alone has.
            timeout: seconds.
            interpreting: run kernels in Triton's interpreter.

        Raises:
            TimeoutError: it had not ended after `timeout` seconds; it has been killed.
            RuntimeError: the process that forks is gone.
        """
        try:
            server = self._idle[interpreting].get_nowait()
        except queue.Empty:
            server = subprocess.Popen(
                [sys.executable, __file__],
                cwd=self._folder,
                env={**self._environment, "TRITON_INTERPRET": str(int(interpreting))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert server.stdin is not None
        assert server.stdout is not None
        with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as printed:
            server.stdin.write(json.dumps([arguments, environment, timeout, printed.name]) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
            if not answer:
                raise RuntimeError(f"no answer from the process that forks; exit status {server.wait()}")
            self._idle[interpreting].put(server)
            status = json.loads(answer)
            if status is None:
                raise TimeoutError(f"no end after {timeout} s")
            return status, printed.read()

    def close(self) -> None:
        """End the processes, once no call is running."""
        for idle in self._idle.values():
            while not idle.empty():
                idle.get().communicate()


def _wait(child: int, timeout: int) -> int | None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def _run(arguments: list[str], environment: dict[str, str], printed: str) -> NoReturn:
    """Run pytest in this process, and leave it without freeing what it holds, which takes as long as a test."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(printed, os.O_WRONLY), 1)
    os.dup2(1, 2)
    os.environ.update(environment)
    status = sys.modules["pytest"].main(arguments)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def serve() -> None:
    """Answer until the input ends."""
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # what is here already is no garbage of a test
    for line in sys.stdin:
        arguments, environment, timeout, printed = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(arguments, environment, printed)
        sys.stdout.write(json.dumps(_wait(child, timeout)) + "\n")
        sys.stdout.flush()
    os._exit(0)  # Triton's bindings would list what nobody freed


if __name__ == "__main__":
    serve()
