"""The other ranks as rank 0 sees them: started, called, watched, and always ended."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from tritonllm.engine.launch_place import launch_place
from tritonllm.engine.rank_calls import encode_call
from tritonllm.engine.resolve import ResolvedModel
from tritonllm.errors import EngineError, TritonLLMError
from tritonllm.models.tensor_parallel import TPGroup

_LEAVE_SECONDS = 5.0
_BLAME_SECONDS = 2.0
_ABORT_SECONDS = 1.0
_SETTLE_SECONDS = 0.2


class Channel(Protocol):
    """What takes messages to every other rank."""

    def send(self, message: bytes, check: Callable[[], None]) -> None:
        """Send a message of any size; `check` is called while there is no room, and may raise.

        Raises:
            OSError: a reader is gone.
        """

    def close(self) -> None:
        """Let go of what is shared with the readers. Calling it again does nothing."""


class Ranks(ABC):
    """Ranks 1 to n - 1 of an engine, a process each.

    A thread watches them: one that ends too early becomes the engine's failure, and what waits for it is released.
    How ranks are started and reached is left to the classes below this one.

    Args:
        resolved: the model, which is sent to the ranks.
        drop_graphs: drops this rank's CUDA graphs. NCCL leaves a group only when no graph holds its collectives, even
            where it is aborted.

    Attributes:
        size: number of ranks, with rank 0.
        group: rank 0's place in the group.

    Raises:
        EngineError: a rank failed, with its traceback; nothing is left behind.
    """

    def __init__(self, resolved: ResolvedModel, drop_graphs: Callable[[], None]) -> None:
        self.size = resolved.engine.world_size
        self.group = TPGroup()
        self._drop_graphs = drop_graphs
        self._channel: Channel | None = None
        self._sentinels: Sequence[Any] = []  # of ranks 1 to n - 1, for connection.wait: ready when that rank has ended
        self._reports: list[Connection] = []
        self._reported: dict[int, tuple[float, str]] = {}  # rank to when and what it raised
        self._failed = threading.Event()
        self._closed = False
        self._process_id = os.getpid()
        self._stop, stopped = Pipe()
        self._watcher = threading.Thread(target=self._watch, args=(stopped,), daemon=True)
        with self.guarded(closing=True):
            self._start(resolved)

    # ---- what differs ----

    @abstractmethod
    def _start(self, resolved: ResolvedModel) -> None:
        """Start or meet the ranks, fill `_channel`, `_sentinels` and `_reports`, start `_watcher`, make `group`."""

    @abstractmethod
    def _has_ended(self, rank: int) -> bool:
        """Whether a rank's process is gone."""

    @abstractmethod
    def _how_ended(self, rank: int) -> str:
        """A sentence on the end of a rank that reported nothing."""

    @abstractmethod
    def _end(self, deadline: float) -> None:
        """Wait for the ranks to leave, up to a time of `time.monotonic`, and end those that are left."""

    @abstractmethod
    def _forget(self) -> None:
        """Give back what is left of ended ranks, which nobody watches any more."""

    # ---- use ----

    def wait_until_loaded(self) -> None:
        """Wait until every rank holds its weights; inside `guarded`.

        Loading may take one rank minutes longer than another. A wait here can be interrupted, one in a collective not.
        """
        self._wait_for("loaded")

    def wait_until_ready(self) -> None:
        """Wait until every rank can serve; inside `guarded`."""
        self._wait_for("ready")

    def publish(self, method: str, args: tuple[Any, ...]) -> None:
        """Have every other rank run a method of its runner; returns at once."""
        if self._closed or self._channel is None:
            raise EngineError("the other ranks have ended; make a new engine")
        self._check()
        self._channel.send(encode_call(method, args), self._check)

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

        The ranks are ended then, and by an interrupt, which leaves them in the middle of different steps; with
        `closing`, after any error.
        """
        try:
            yield
        except BaseException as error:
            blamed, interrupted = None, not isinstance(error, Exception)
            if not interrupted and not isinstance(error, TritonLLMError):
                blamed = self._blame()
            if blamed is not None or interrupted or closing:
                self.close(failed=True)
            if blamed is not None:
                raise EngineError(blamed) from error
            raise

    def close(self, failed: bool = False) -> None:
        """End every rank and remove what was shared with them. Calling it again does nothing.

        They leave by themselves, unless the engine failed; who has not left within seconds is ended.
        """
        if self._closed or os.getpid() != self._process_id:  # a fork of the engine's process does not own the ranks
            return
        failed = failed or self._failed.is_set()
        self._closed = True
        deadline = time.monotonic() + _LEAVE_SECONDS
        try:
            if not failed and self._channel is not None:
                self._channel.send(encode_call("exit", ()), lambda: _until(deadline))
                failed = not _ended_within(_LEAVE_SECONDS, self.group.close)
        except Exception:
            failed = True
        finally:
            self._end(0.0 if failed else deadline)
            self._leave_group(failed)
            self._forget()
            for reports in self._reports:
                reports.close()
            self._reports.clear()
            if self._channel is not None:
                self._channel.close()

    # ---- watching ----

    def _leave_group(self, failed: bool) -> None:
        with suppress(Exception):
            self._drop_graphs()
        self._stop.close()
        if self._watcher.is_alive():
            self._watcher.join(_ABORT_SECONDS)
        if failed and not self._watcher.is_alive():  # which may have left the group, or be stuck in that
            _ended_within(_ABORT_SECONDS, lambda: self.group.close(failed=True))
        self.group = TPGroup()

    def _watch(self, stopped: Connection) -> None:
        ended = connection.wait([*self._sentinels, stopped])
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
        if silent:
            return self._how_ended(silent[0])
        rank = min(lost, key=lambda rank: self._reported[rank][0])
        return f"rank {rank} of {self.size} failed; make a new engine.\n{self._reported[rank][1]}"

    def _lost(self) -> list[int]:
        """Ranks that have failed or ended, with what they reported read."""
        ended = {rank for rank in range(1, len(self._sentinels) + 1) if self._has_ended(rank)}
        for reports in self._reports:
            while not reports.closed and reports.poll() and self._read(reports)[0] != "ended":
                pass
        return sorted({*ended, *self._reported})


def start_ranks(resolved: ResolvedModel, drop_graphs: Callable[[], None]) -> Ranks:
    """The other ranks of an engine on rank 0: those that torchrun started, else processes spawned here."""
    if launch_place(resolved.engine.world_size) is not None:
        from tritonllm.engine.launched_ranks import LaunchedRanks

        return LaunchedRanks(resolved, drop_graphs)
    from tritonllm.engine.spawned_ranks import SpawnedRanks

    return SpawnedRanks(resolved, drop_graphs)


class _RankLost(Exception):
    """Raised inside `Ranks.guarded`, which says what happened."""


def _ended_within(seconds: float, call: Callable[[], None]) -> bool:
    """Make a call that may block for ever; False if it still does, in a thread that is left to itself."""

    def run() -> None:
        with suppress(Exception):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _until(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError
