"""The thread that owns an engine: requests come in from anywhere, pieces go out to the mailboxes of their consumers."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from tritonllm.engine.completion import Completion
from tritonllm.engine.llm_engine import LLMEngine
from tritonllm.engine.mailbox import Mailbox, wake_all
from tritonllm.errors import EngineError


class Submission:
    """One request of a consumer.

    Args:
        queue: puts it into the engine; called in the engine's thread, and raises RequestError if it cannot be served.
        box: where its pieces go.
    """

    def __init__(self, queue: Callable[[], list[Completion]], box: Mailbox) -> None:
        self.queue = queue
        self.box = box
        self.dropped = False


class EngineThread:
    """Steps an engine as long as there are requests, and sleeps while there are none.

    The thread holds the engine's turn all its life, so that the engine refuses every other thread. It never waits for a
    consumer. It ends by `close` or by a failure of the engine, gives back the engine's memory, and fails every request
    that is left; nothing keeps it from ending with the interpreter.

    Args:
        engine: an engine at rest.
        max_requests: requests in the engine at a time; later ones wait here, in the order of their arrival.
    """

    def __init__(self, engine: LLMEngine, max_requests: int) -> None:
        self._engine = engine
        self._steps = engine.step_loop
        self._max_requests = max_requests
        self._changed = threading.Condition()
        self._arrived: list[Submission] = []
        self._dropped: list[Submission] = []
        self._closing = False
        self._end: EngineError | None = None
        self._backlog: deque[Submission] = deque()
        self._live: dict[Submission, list[Completion]] = {}
        self._thread = threading.Thread(target=self._run, name="tritonllm engine", daemon=True)
        self._thread.start()

    # ---- from any thread ----

    def submit(self, submission: Submission) -> None:
        """Take a request.

        Raises:
            EngineError: the thread has ended; says why.
        """
        with self._changed:
            if self._end is not None:
                raise _again(self._end)
            self._arrived.append(submission)
            self._changed.notify()

    def drop(self, submission: Submission) -> None:
        """Abort a request that nobody waits for any more; nothing happens if it is over."""
        with self._changed:
            submission.dropped = True
            self._dropped.append(submission)
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the step under way, and wait for it."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:  # the garbage collector runs in any
            self._thread.join()

    # ---- in the thread ----

    def _run(self) -> None:
        end = EngineError("the engine was closed by exit(); make a new one")
        try:
            with self._steps.guard.turn():
                try:
                    while self._take_in():
                        self._steps.advance()
                        self._hand_out()
                finally:
                    self._engine.exit()
        except BaseException as error:  # whatever it is, those who wait must not wait for ever
            end = EngineError(
                str(error) if isinstance(error, EngineError) else f"the engine's thread failed: {error!r}"
            )
            end.__cause__ = error
        with self._changed:
            self._end = end
            left = [*self._live, *self._backlog, *self._arrived]
        for submission in left:
            self._fail(submission, _again(end))

    def _take_in(self) -> bool:
        """Wait until there is work, then take in what came and went meanwhile; False once it is time to end."""
        with self._changed:
            while not (self._closing or self._arrived or self._dropped or self._has_work):
                self._changed.wait()
            if self._closing:
                return False
            self._backlog.extend(self._arrived)
            dropped = self._dropped
            self._arrived, self._dropped = [], []
        for submission in dropped:
            self._abort(submission)
        while self._backlog and len(self._live) < self._max_requests:
            self._admit(self._backlog.popleft())
        return True

    @property
    def _has_work(self) -> bool:
        return bool(self._backlog) or not self._engine.scheduler.is_finished()

    def _admit(self, submission: Submission) -> None:
        if submission.dropped:
            return
        try:
            self._live[submission] = submission.queue()
        except Exception as error:  # a prompt's own fault, or its template's: nobody else's
            self._fail(submission, error)

    def _hand_out(self) -> None:
        """Put what the last step brought into the mailboxes; each event loop is woken once."""
        filled: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
        for submission, completions in list(self._live.items()):
            box = submission.box
            pieces = [piece for it in completions if (piece := it.next_piece()) is not None]
            if pieces and box.put(pieces):
                filled.setdefault(box.loop, []).append(box)
            if all(it.all_sent for it in completions):
                del self._live[submission]
        for loop, boxes in filled.items():
            self._wake(loop, boxes)

    def _fail(self, submission: Submission, error: Exception) -> None:
        submission.box.fail(error)
        self._wake(submission.box.loop, [submission.box])

    def _wake(self, loop: asyncio.AbstractEventLoop, boxes: list[Mailbox]) -> None:
        try:
            loop.call_soon_threadsafe(wake_all, boxes)
        except RuntimeError:  # the loop was closed, and its consumers are gone with it
            for submission in [it for it in self._live if it.box.loop is loop]:
                self._abort(submission)

    def _abort(self, submission: Submission) -> None:
        for completion in self._live.pop(submission, ()):
            self._engine.scheduler.abort(completion.seq)


def _again(error: EngineError) -> EngineError:
    """The same error for one more consumer; two that raise one exception would write into one traceback."""
    copy = EngineError(str(error))
    copy.__cause__ = error.__cause__
    return copy
