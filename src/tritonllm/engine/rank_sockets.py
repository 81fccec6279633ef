"""Messages from rank 0 to ranks that may be on other hosts, through a TCP connection to each."""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

SECRET_BYTES = 16
_GREETING = struct.Struct(f"!{SECRET_BYTES}sI?")
_SILENT_SECONDS = 4
_ACCEPT_SECONDS = 0.2


class SocketWriter:
    """The writing end; each reader gets every message.

    Args:
        connections: one to each reader, which sends nothing back: it becomes readable when that reader is gone.
    """

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def send(self, message: bytes, check: Callable[[], None]) -> None:
        """Send a message of any size; `check` may raise before.

        Raises:
            OSError: a reader is gone, or its host has not answered for seconds.
        """
        check()
        for reader in self._connections:
            reader.send_bytes(message)

    def close(self) -> None:
        """Close the connections. Calling it again does nothing."""
        for reader in self._connections:
            reader.close()


class SocketReader:
    """The reading end of one connection."""

    def __init__(self, writer: Connection) -> None:
        self._writer = writer

    def receive(self) -> bytes:
        """Wait for the next message.

        Raises:
            OSError, EOFError: the writer is gone.
        """
        return self._writer.recv_bytes()

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


def listen() -> socket.socket:
    """A socket on a port that the system picks, on every address of this host."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def accept_pairs(
    server: socket.socket, secret: bytes, size: int, deadline: float
) -> tuple[list[Connection], list[Connection], str]:
    """Wait until every rank but 0 has come twice: once for calls, once for reports.

    Whoever does not know the secret is turned away before anything of it is read.

    Returns:
        Connections for calls and for reports, each in the order of the ranks, and an address of this host at which
        ranks reach it, one that other hosts can use if there is any.

    Raises:
        TimeoutError: names the ranks that have not come by a time of `time.monotonic`.
    """
    found: dict[tuple[int, bool], Connection] = {}
    addresses: set[str] = set()
    wanted = {(rank, kind) for rank in range(1, size) for kind in (False, True)}
    server.settimeout(_ACCEPT_SECONDS)
    while missing := wanted - found.keys():
        if time.monotonic() > deadline:
            for end in found.values():
                end.close()
            raise TimeoutError(f"ranks {sorted({rank for rank, _ in missing})} have not come")
        try:
            client, _ = server.accept()
        except TimeoutError:
            continue
        who = _greeted(client, secret)
        if who in missing:
            addresses.add(_local_address(client))
            found[who] = _connection(client)
        else:
            client.close()
    reachable = sorted(addresses, key=lambda address: (address.startswith("127.") or address == "::1", address))
    calls, reports = ([found[rank, kind] for rank in range(1, size)] for kind in (False, True))
    return calls, reports, reachable[0]


def connect_pair(address: str, port: int, secret: bytes, rank: int) -> tuple[Connection, Connection, str]:
    """The other side of `accept_pairs`: connections for calls and for reports, and this rank's own address."""
    ends = []
    for kind in (False, True):
        client = socket.create_connection((address, port))
        client.sendall(_GREETING.pack(secret, rank, kind))
        own_address = _local_address(client)
        ends.append(_connection(client))
    return ends[0], ends[1], own_address


def _greeted(client: socket.socket, secret: bytes) -> tuple[int, bool] | None:
    client.settimeout(_SILENT_SECONDS)
    greeting = b""
    with suppress(OSError):
        greeting = client.recv(_GREETING.size, socket.MSG_WAITALL)
    if len(greeting) != _GREETING.size:
        return None
    told, rank, kind = _GREETING.unpack(greeting)
    return (rank, kind) if hmac.compare_digest(told, secret) else None


def _local_address(client: socket.socket) -> str:
    return str(client.getsockname()[0]).removeprefix("::ffff:")


def _connection(client: socket.socket) -> Connection:
    """Small messages leave at once, and a host that is silent for seconds is taken for gone."""
    client.settimeout(None)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", _SILENT_SECONDS - 1),
        ("TCP_USER_TIMEOUT", _SILENT_SECONDS * 1000),
    ):
        if hasattr(socket, name):
            client.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(client.detach())
