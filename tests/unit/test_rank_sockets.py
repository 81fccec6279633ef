"""Calls through TCP: every rank that knows the secret is met, others are turned away, either side sees the other go."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from tritonllm.engine.rank_sockets import SocketReader, SocketWriter, accept_pairs, connect_pair, listen

SECRET = bytes(range(16))


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with listen() as server:
        yield server


def never() -> None:
    """For messages that may go."""


def connected(server: socket.socket, size: int) -> tuple[SocketWriter, list, list[SocketReader], list]:
    port = server.getsockname()[1]
    others = []

    def come(rank: int) -> None:
        others.append((rank, connect_pair("127.0.0.1", port, SECRET, rank)))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    calls, reports, address = accept_pairs(server, SECRET, size, time.monotonic() + 20)
    for thread in threads:
        thread.join()
    assert address == "127.0.0.1"
    ends = [pair for _, pair in sorted(others, key=lambda other: other[0])]
    assert [end[2] for end in ends] == ["127.0.0.1"] * (size - 1)
    return SocketWriter(calls), reports, [SocketReader(end[0]) for end in ends], [end[1] for end in ends]


def test_messages_of_any_size_reach_the_ranks_they_are_for(server: socket.socket) -> None:
    writer, reports, readers, own_reports = connected(server, 4)
    rng = random.Random(0)
    messages = [rng.randbytes(size) for size in (0, 1, 6, 16384, 5 << 20, *(rng.randrange(99999) for _ in range(20)))]
    received: list[list[bytes]] = [[] for _ in readers]

    def read(index: int) -> None:
        received[index] += [readers[index].receive() for _ in messages]

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(readers))]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.send(message, never)
    for thread in threads:
        thread.join(30)
    assert received == [messages] * 3
    for rank, end in enumerate(own_reports, 1):
        end.send(("ready", rank))
    assert [end.recv() for end in reports] == [("ready", 1), ("ready", 2), ("ready", 3)]
    for end in (writer, *readers, *reports, *own_reports):
        end.close()
        end.close()


def test_small_messages_do_not_wait_for_each_other(server: socket.socket) -> None:
    writer, reports, (reader,), own_reports = connected(server, 2)
    start = time.monotonic()
    for index in range(100):
        writer.send(b"a step", never)
        writer.send(bytes(index), never)
        assert reader.receive() == b"a step"
        assert reader.receive() == bytes(index)
    assert time.monotonic() - start < 1  # Nagle's algorithm would hold each second one back for 40 ms
    for end in (writer, reader, *reports, *own_reports):
        end.close()


def send_often(writer: SocketWriter) -> None:
    for _ in range(100):
        writer.send(bytes(10_000), never)


def test_either_side_sees_that_the_other_is_gone(server: socket.socket) -> None:
    writer, reports, (reader,), own_reports = connected(server, 2)
    reader.close()
    with pytest.raises(OSError, match="."):
        send_often(writer)
    writer.close()
    for end in (*reports, *own_reports):
        end.close()
    writer, reports, (reader,), own_reports = connected(server, 2)
    writer.close()
    with pytest.raises(EOFError):
        reader.receive()
    for end in (reader, *reports, *own_reports):
        end.close()


def test_a_lost_engine_sends_nothing(server: socket.socket) -> None:
    class Lost(Exception):
        pass

    def lost() -> None:
        raise Lost

    with pytest.raises(Lost):
        SocketWriter([]).send(b"", lost)


@pytest.mark.parametrize(
    "greeting",
    [b"", b"GET / HTTP/1.1", struct.pack("!16sI?", bytes(16), 1, False), struct.pack("!16sI?", SECRET, 7, False)],
    ids=["nothing", "short", "wrong secret", "no such rank"],
)
def test_strangers_are_turned_away_and_who_has_not_come_is_named(server: socket.socket, greeting: bytes) -> None:
    stranger = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
    stranger.sendall(greeting)
    stranger.shutdown(socket.SHUT_WR)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] have not come"):
        accept_pairs(server, SECRET, 3, time.monotonic() + 0.5)
    stranger.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    stranger.close()
