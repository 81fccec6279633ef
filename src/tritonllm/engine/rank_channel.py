"""Messages of any size from rank 0 to all other ranks, through a ring of slots in shared memory."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.shared_memory import SharedMemory

NUM_SLOTS = 16
SLOT_BYTES = 64 * 1024
_LENGTH = struct.Struct("=Q")
_POLL_SECONDS = 0.2
_EVENT = b"\0"


class ChannelWriter:
    """The writing end. A message is cut into slots; a full ring waits for its slowest reader.

    The segment has a name that nobody else has, and is gone after `close`. Events pass through a socket pair for each
    reader: a byte there says that a slot was written, a byte back that it was read. So nothing else has a name, the
    segment holds nothing but messages, and either side sees when the other one is gone.

    Args:
        context: makes what other processes can share.
        num_readers: readers, each of which gets every message.

    Attributes:
        name: of the segment.
        readers: the readers' ends of the socket pairs; close each here once its process has it.
    """

    def __init__(self, context: SpawnContext, num_readers: int) -> None:
        self._segment = SharedMemory(create=True, size=NUM_SLOTS * SLOT_BYTES)
        self._memory = memoryview(self._segment.buf)  # type: ignore[arg-type]
        self.name = self._segment.name
        pairs = [context.Pipe() for _ in range(num_readers)]
        self._events: list[Connection] = [ours for ours, _ in pairs]
        self.readers: list[Connection] = [theirs for _, theirs in pairs]
        self._free = [NUM_SLOTS] * num_readers
        self._slot = 0

    def send(self, message: bytes, check: Callable[[], None]) -> None:
        """Write a message of any size; `check` is called while there is no room, and may raise.

        Raises:
            OSError: a reader is gone.
        """
        data = _LENGTH.pack(len(message)) + message
        for start in range(0, len(data), SLOT_BYTES):
            for index in range(len(self._events)):
                self._wait_for_room(index, check)
            offset, piece = self._slot * SLOT_BYTES, data[start : start + SLOT_BYTES]
            self._memory[offset : offset + len(piece)] = piece
            for events in self._events:
                os.write(events.fileno(), _EVENT)
            self._slot = (self._slot + 1) % NUM_SLOTS

    def close(self) -> None:
        """Remove the segment. Calling it again does nothing."""
        for end in (*self._events, *self.readers):
            end.close()
        self._memory.release()
        self._segment.close()
        with suppress(FileNotFoundError):
            self._segment.unlink()

    def _wait_for_room(self, index: int, check: Callable[[], None]) -> None:
        while not self._free[index]:
            if connection.wait([self._events[index]], _POLL_SECONDS):
                read = len(os.read(self._events[index].fileno(), NUM_SLOTS))
                if not read:
                    raise ConnectionResetError("the reader is gone")
                self._free[index] += read
            else:
                check()
        self._free[index] -= 1


class ChannelReader:
    """One reading end, in another process.

    Args:
        name: of the writer's segment.
        events: this reader's end of its socket pair.
    """

    def __init__(self, name: str, events: Connection) -> None:
        self._segment = SharedMemory(name)
        self._memory = memoryview(self._segment.buf)  # type: ignore[arg-type]
        self._events = events
        self._slot = 0

    def receive(self) -> bytes | bytearray:
        """Wait for the next message.

        Raises:
            OSError: the writer is gone.
        """
        self._wait()
        (length,) = _LENGTH.unpack_from(self._memory, self._slot * SLOT_BYTES)
        data = self._piece(_LENGTH.size, length)
        if len(data) == length:
            return data
        pieces = bytearray(data)
        while len(pieces) < length:
            self._wait()
            pieces += self._piece(0, length - len(pieces))
        return pieces

    def close(self) -> None:
        """Let go of the segment."""
        self._memory.release()
        self._segment.close()
        self._events.close()

    def _wait(self) -> None:
        if not os.read(self._events.fileno(), 1):
            raise ConnectionResetError("the writer is gone")

    def _piece(self, offset: int, wanted: int) -> bytes:
        """What the next slot has of a message from an offset on; the slot is free again."""
        start, end = self._slot * SLOT_BYTES, (self._slot + 1) * SLOT_BYTES
        piece = bytes(self._memory[start + offset : min(start + offset + wanted, end)])
        os.write(self._events.fileno(), _EVENT)
        self._slot = (self._slot + 1) % NUM_SLOTS
        return piece
