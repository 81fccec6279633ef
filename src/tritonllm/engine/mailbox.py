"""From the engine's thread to a coroutine that waits for pieces of its text."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

from tritonllm.engine.outputs import StreamOutput


class Mailbox:
    """What one consumer has not taken yet. The consumer makes it in its event loop; `put` and `fail` are the thread's.

    The thread never waits: a consumer that comes late gets everything since its last piece as one. So a box holds no
    more than one completion.

    Attributes:
        loop: the consumer's event loop, in which `wake` has to be called.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._filled = asyncio.Event()
        self._pieces: list[StreamOutput] = []
        self._error: Exception | None = None

    def put(self, pieces: list[StreamOutput]) -> bool:
        """Add pieces; True if the consumer has to be woken."""
        with self._lock:
            was_empty = not self._pieces
            self._pieces += pieces
            return was_empty

    def fail(self, error: Exception) -> None:
        """Let the consumer raise this once it has taken what is there; to be woken in any case."""
        with self._lock:
            self._error = error

    def wake(self) -> None:
        """There is something to take."""
        self._filled.set()

    async def take(self) -> list[StreamOutput]:
        """Wait for the next pieces, one of each sample that has some.

        Raises:
            Exception: what `fail` was given.
        """
        while True:
            await self._filled.wait()
            self._filled.clear()
            with self._lock:
                pieces, self._pieces = self._pieces, []
                error = self._error
            if pieces:
                if error is not None:
                    self._filled.set()
                return _joined(pieces)
            if error is not None:
                raise error


def wake_all(boxes: list[Mailbox]) -> None:
    """Wake consumers of one event loop, from inside it."""
    for box in boxes:
        box.wake()


def _joined(pieces: list[StreamOutput]) -> list[StreamOutput]:
    """The pieces of each sample as one, in the order in which they began."""
    samples: dict[int, list[StreamOutput]] = {}
    for piece in pieces:
        samples.setdefault(piece.sample, []).append(piece)
    return [own[0] if len(own) == 1 else _join(own) for own in samples.values()]


def _join(pieces: list[StreamOutput]) -> StreamOutput:
    text = "".join(piece.text for piece in pieces)
    token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
    logprobs = [entry for piece in pieces for entry in piece.logprobs or ()]
    return replace(
        pieces[-1],
        text=text,
        token_ids=token_ids,
        logprobs=None if pieces[-1].logprobs is None else logprobs,
        prompt_logprobs=pieces[0].prompt_logprobs,
    )
