"""Messages from rank 0 to the others: any size, in order, to every reader, under names that nobody else has."""

from __future__ import annotations

import multiprocessing
import random
import threading

import pytest
from test_ranks import nothing_is_left, segments  # noqa: F401  the fixture is for every test here, too

from tritonllm.engine.rank_channel import NUM_SLOTS, SLOT_BYTES, ChannelReader, ChannelWriter

CONTEXT = multiprocessing.get_context("spawn")


def never() -> None:
    """For messages that find room at once, or a reader that reads."""


@pytest.fixture
def ends():
    writer = ChannelWriter(CONTEXT, 2)
    readers = [ChannelReader(writer.name, events) for events in writer.readers]
    yield writer, readers
    for reader in readers:
        reader.close()
    writer.close()


def test_every_reader_gets_every_message_in_order(ends) -> None:
    writer, readers = ends
    rng = random.Random(0)
    sizes = [
        0,
        1,
        *range(SLOT_BYTES - 9, SLOT_BYTES + 2),
        NUM_SLOTS * SLOT_BYTES,
        3 << 20,
        *(rng.randrange(9999) for _ in range(50)),
    ]
    messages = [rng.randbytes(size) for size in sizes]
    received: list[list] = [[], []]

    def read(reader: ChannelReader, into: list) -> None:
        into += [reader.receive() for _ in messages]

    threads = [threading.Thread(target=read, args=pair) for pair in zip(readers, received, strict=True)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.send(message, never)
    for thread in threads:
        thread.join(60)
    assert received == [messages, messages]


def test_a_full_ring_asks_whether_to_go_on_waiting(ends) -> None:
    writer, readers = ends

    class Lost(Exception):
        pass

    def lost() -> None:
        raise Lost

    for index in range(NUM_SLOTS):
        writer.send(bytes(index), lost)
    for _ in range(NUM_SLOTS):
        readers[0].receive()
    with pytest.raises(Lost):  # the other reader has read nothing
        writer.send(b"one too many", lost)


def test_either_side_sees_that_the_other_is_gone() -> None:
    writer = ChannelWriter(CONTEXT, 1)
    reader = ChannelReader(writer.name, writer.readers[0])
    for index in range(NUM_SLOTS):
        writer.send(bytes(index), never)
    reader.close()
    with pytest.raises(ConnectionResetError):
        writer.send(b"nobody reads this", never)
    writer.close()

    writer = ChannelWriter(CONTEXT, 1)
    reader = ChannelReader(writer.name, writer.readers.pop())
    writer.close()
    with pytest.raises(ConnectionResetError):
        reader.receive()
    reader.close()


def test_names_are_unique_and_gone_after_close() -> None:
    writers = [ChannelWriter(CONTEXT, 1) for _ in range(3)]
    assert len({writer.name for writer in writers}) == 3
    assert {writer.name for writer in writers} <= segments()
    for writer in writers:
        writer.close()
        writer.close()
    assert not {writer.name for writer in writers} & segments()
