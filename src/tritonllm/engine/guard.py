"""Who may be inside an engine: one thread at a time, and Ctrl-C only between its steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tritonllm.errors import EngineError


class EngineGuard:
    """A re-entrant lock that refuses instead of waiting, and holds Ctrl-C back while it is held.

    A step changes the scheduler, then the device, then the scheduler again. Another thread in between, or a
    KeyboardInterrupt, would leave the two telling different stories.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._received: list[int] | None = None

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed in the turn under way; the end of the turn raises KeyboardInterrupt then."""
        return bool(self._received)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Be alone in the engine; turns of one thread may be nested.

        Raises:
            EngineError: another thread has its turn.
            KeyboardInterrupt: at the end, if Ctrl-C was pressed meanwhile.
        """
        with _interrupts_held_back() as received:
            if not self._lock.acquire(blocking=False):
                raise EngineError(
                    "another thread is using this engine; call it from one thread at a time, put a lock around your "
                    "calls, or give all prompts to one generate()"
                )
            try:
                if received is not None:
                    self._received = received
                yield
            finally:
                if received is not None:
                    self._received = None
                self._lock.release()


@contextmanager
def _interrupts_held_back() -> Iterator[list[int] | None]:
    """Collect SIGINT in the list it gives, and raise KeyboardInterrupt at the end if there was one.

    Gives None and changes nothing outside the main thread, where Python handles no signals, and where SIGINT has a
    handler of somebody else's: a program's own, or an outer turn's.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield None
        return
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    signal.signal(signal.SIGINT, receive)
    try:
        yield received
    except KeyboardInterrupt:
        received.clear()  # it is on its way already
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if received:
            raise KeyboardInterrupt
