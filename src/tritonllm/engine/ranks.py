"""The other ranks as rank 0 sees them: started, called, watched, and always ended."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from tritonllm.engine.rank_channel import ChannelWriter
from tritonllm.engine.rank_process import NO_MAIN_GUARD, RankArguments, rank_main
from tritonllm.engine.resolve import ResolvedModel
from tritonllm.errors import EngineError, TritonLLMError
from tritonllm.models.collectives import DistributedGroup
from tritonllm.models.tensor_parallel import TPGroup

_LEAVE_SECONDS = 5.0
_BLAME_SECONDS = 2.0
_SETTLE_SECONDS = 0.2


class Ranks:
    """Ranks 1 to n - 1 of an engine, one spawned process each.

    They meet through a store on a port that the system picks, so any number of engines fit on one host. A thread
    watches the processes: one that ends too early becomes the engine's failure, and what waits for it is released.

    Args:
        resolved: the model, which is sent to the ranks.

    Attributes:
        group: rank 0's place in the group.

    Raises:
        EngineError: a rank failed, with its traceback; nothing is left behind.
    """

    def __init__(self, resolved: ResolvedModel) -> None:
        _leave_if_imported_again()
        self.size = resolved.engine.world_size
        self.group = TPGroup()
        self._processes: list[BaseProcess] = []
        self._reports: list[Connection] = []
        self._reported: dict[int, tuple[float, str]] = {}  # rank to when and what it raised
        self._failed = threading.Event()
        self._closed = False
        self._process_id = os.getpid()
        context = multiprocessing.get_context("spawn")
        self._channel = ChannelWriter(context, self.size - 1)
        self._stop, stopped = context.Pipe()
        self._watcher = threading.Thread(target=self._watch, args=(stopped,), daemon=True)
        with self.guarded(closing=True):
            self._start(resolved, context)

    def _start(self, resolved: ResolvedModel, context: Any) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        device = torch.device("cpu")
        if resolved.engine.device == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        threads = max(1, torch.get_num_threads() // self.size)
        sent = pickle.dumps(replace(resolved, tokenizer=None))
        for rank, events in enumerate(self._channel.readers, 1):
            index = (device.index + rank) % torch.cuda.device_count() if device.index is not None else 0
            arguments = RankArguments(rank, self.size, store.port, self._channel.name, events, sent, index, threads)
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=rank_main, args=(arguments, theirs), name=f"tritonllm rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            events.close()
            self._processes.append(process)
            self._reports.append(mine)
        self._watcher.start()
        self._wait_for("here")
        how = resolved.engine.all_reduce
        connect = DistributedGroup.connect
        self.group = self._unless_failed(lambda: connect(0, self.size, store, device, self._check, all_reduce=how))

    # ---- use ----

    def wait_until_ready(self) -> None:
        """Wait until every rank has loaded its part; inside `guarded`."""
        self._wait_for("ready")

    def publish(self, method: str, args: tuple[Any, ...]) -> None:
        """Have every other rank run a method of its runner; returns at once."""
        if self._closed:
            raise EngineError("the other ranks have ended; make a new engine")
        self._check()
        self._channel.send((method, args), self._check)

    def wait(self, done: torch.cuda.Event | None) -> None:
        """Wait for a step on the device; raises EngineError if a rank was lost, as its tokens may be anything then."""
        with self.guarded():
            if done is not None:
                done.synchronize()
            self._check()

    def _check(self) -> None:
        if self._failed.is_set() and not self._closed:
            raise _RankLost

    @contextmanager
    def guarded(self, closing: bool = False) -> Iterator[None]:
        """Inside, an error that comes from another rank is raised as an EngineError with that rank's traceback.

        The ranks are ended then; with `closing`, after any error.
        """
        try:
            yield
        except BaseException as error:
            blamed = None
            if isinstance(error, Exception) and not isinstance(error, TritonLLMError):
                blamed = self._blame()
            if blamed is not None or closing:
                self.close(failed=True)
            if blamed is not None:
                raise EngineError(blamed) from error
            raise

    def close(self, failed: bool = False) -> None:
        """End every rank and remove what was shared with them. Calling it again does nothing.

        They leave by themselves, unless the engine failed; who has not left within seconds is killed.
        """
        if self._closed or os.getpid() != self._process_id:  # a fork of the engine's process does not own the ranks
            return
        failed = failed or self._failed.is_set()
        self._closed = True
        try:
            if not failed:
                deadline = time.monotonic() + _LEAVE_SECONDS
                self._channel.send(("exit", ()), lambda: _until(deadline))
                self.group.close()
                for process in self._processes:
                    process.join(max(0.0, deadline - time.monotonic()))
        except Exception:
            failed = True
        finally:
            self._kill(failed)

    # ---- watching ----

    def _kill(self, failed: bool) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        if failed:
            with suppress(Exception):  # the watcher may have done it
                self.group.close(failed=True)
        self.group = TPGroup()
        self._stop.close()
        if self._watcher.is_alive():
            self._watcher.join()
        for process in self._processes:
            process.close()
        for reports in self._reports:
            reports.close()
        self._processes.clear()
        self._reports.clear()
        self._channel.close()

    def _watch(self, stopped: Connection) -> None:
        sentinels = [process.sentinel for process in self._processes]
        ended = connection.wait([*sentinels, stopped])
        if stopped not in ended and not self._closed:
            self._failed.set()
            if torch.cuda.is_available():
                self.group.close(failed=True)  # a kernel that waits for the lost rank would never end
        stopped.close()

    def _wait_for(self, what: str) -> None:
        """Wait for one report of every rank."""
        for reports in self._reports:
            while not reports.poll(0.05):
                self._check()
            kind, content = self._read(reports)
            if kind != what:
                raise _RankLost

    def _read(self, reports: Connection) -> tuple[str, Any]:
        try:
            kind, content = reports.recv()
        except (EOFError, OSError):
            return "ended", None
        if kind == "failed":
            self._reported[self._reports.index(reports) + 1] = content
        return kind, content

    def _unless_failed(self, call: Callable[[], Any]) -> Any:
        """The result of a call that blocks, given up when a rank is lost."""
        done: list[Any] = []

        def run() -> None:
            try:
                done.append((call(), None))
            except Exception as error:
                done.append((None, error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while not done:
            thread.join(0.02)
            self._check()
        result, error = done[0]
        if error is not None:
            raise error
        return result

    def _blame(self) -> str | None:
        """What happened to the ranks in words, None if nothing did.

        A rank's end takes a moment to be seen, and the ranks that waited for it fail after it.
        """
        deadline = time.monotonic() + _BLAME_SECONDS
        while not (lost := self._lost()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not lost:
            return None
        time.sleep(_SETTLE_SECONDS)
        lost = self._lost()
        silent = [rank for rank in lost if rank not in self._reported]
        if not silent:
            rank = min(lost, key=lambda rank: self._reported[rank][0])
            return f"rank {rank} of {self.size} failed; make a new engine.\n{self._reported[rank][1]}"
        code = self._processes[silent[0] - 1].exitcode
        if code == NO_MAIN_GUARD:
            return (
                "the script that makes this engine has no main guard: each rank imports it anew and would make an "
                'engine of its own; put what it does under `if __name__ == "__main__":`'
            )
        return f"rank {silent[0]} of {self.size} ended with exit code {code} and no word; make a new engine"

    def _lost(self) -> list[int]:
        """Ranks that have failed or ended, with what they reported read."""
        for reports in self._reports:
            while not reports.closed and reports.poll() and self._read(reports)[0] != "ended":
                pass
        ended = [rank for rank, process in enumerate(self._processes, 1) if process.exitcode is not None]
        return sorted({*ended, *self._reported})


class _RankLost(Exception):
    """Raised inside `Ranks.guarded`, which says what happened."""


def _until(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError


def _leave_if_imported_again() -> None:
    """End a process that is still importing the script of the engine that spawned it, without a word of its own.

    Python's own answer to a script without a main guard is a traceback in each process, about something else.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(NO_MAIN_GUARD)
