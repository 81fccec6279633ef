"""From the engine's thread to a coroutine that waits for pieces of its text."""

from __future__ import annotations

import asyncio
import threading

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

    def put(self, piece: StreamOutput) -> bool:
        """Add a piece; True if the consumer has to be woken."""
        with self._lock:
            self._pieces.append(piece)
            return len(self._pieces) == 1

    def fail(self, error: Exception) -> None:
        """Let the consumer raise this once it has taken what is there; to be woken in any case."""
        with self._lock:
            self._error = error

    def wake(self) -> None:
        """There is something to take."""
        self._filled.set()

    async def take(self) -> StreamOutput:
        """Wait for the next piece.

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


def _joined(pieces: list[StreamOutput]) -> StreamOutput:
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1]
    return StreamOutput(
        last.index,
        "".join(piece.text for piece in pieces),
        [token_id for piece in pieces for token_id in piece.token_ids],
        last.finish_reason,
        last.error,
        last.stop_reason,
    )
