"""What runs in the process of a rank other than 0. Nothing heavy is imported before errors can be reported."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from tritonllm.engine.rank_calls import decode_call
from tritonllm.engine.rank_channel import ChannelReader

if TYPE_CHECKING:
    from tritonllm.models.tensor_parallel import TPGroup

NO_MAIN_GUARD = 87
"""Exit code of a rank in which the user's script, imported anew, makes an engine again."""


@dataclass(frozen=True)
class RankArguments:
    """All that a rank is told.

    Attributes:
        rank, size: its place.
        port: of rank 0's store, on this host.
        segment, events: its end of the channel.
        resolved: a pickled `ResolvedModel`: a rank resolves no name and discovers no plugin.
        device_index: its GPU.
        num_threads: of torch on a CPU.
    """

    rank: int
    size: int
    port: int
    segment: str
    events: Connection
    resolved: bytes
    device_index: int
    num_threads: int


class Reader(Protocol):
    """Where messages of rank 0 come from, in order."""

    def receive(self) -> bytes | bytearray:
        """Wait for the next message."""

    def close(self) -> None:
        """Take no more."""


class Rank0:
    """Rank 0 as a `ModelRunner` of another rank sees it.

    Attributes:
        group: that rank's place in the group.
    """

    def __init__(self, group: TPGroup, channel: Reader, reports: Connection) -> None:
        self.group = group
        self._channel = channel
        self._reports = reports

    def wait_until_loaded(self) -> None:
        """Tell rank 0 that this rank holds its weights; collectives do the waiting."""
        self._reports.send(("loaded", None))

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next call, `(method, args)`."""
        return decode_call(self._channel.receive())


def rank_main(arguments: RankArguments, reports: Connection) -> None:
    """Connect, load, serve the calls of rank 0, leave.

    Reports `("here", None)` once everything is imported, `("loaded", None)` with its weights, `("ready", None)` when it
    can serve, or `("failed", (time, traceback))`; then the process ends. It also ends with rank 0's.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _serve(arguments, reports)
    except BaseException:
        reports.send(("failed", (time.time(), traceback.format_exc())))
        # Without waiting for peers that may never answer: closed connections tell them.
        leave(1)
    # All is given back. Taking the interpreter apart would cost time, and threads of libraries may not survive it.
    leave(0)


def _serve(arguments: RankArguments, reports: Connection) -> None:
    import torch

    from tritonllm.models.collectives import DistributedGroup

    channel = ChannelReader(arguments.segment, arguments.events)
    resolved: Any = pickle.loads(arguments.resolved)
    reports.send(("here", None))
    device = torch.device("cpu")
    if resolved.engine.device == "cuda":
        device = torch.device("cuda", arguments.device_index)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(arguments.num_threads)
    store = torch.distributed.TCPStore("127.0.0.1", arguments.port, is_master=False)
    group = DistributedGroup.connect(
        arguments.rank, arguments.size, store, device, all_reduce=resolved.engine.all_reduce
    )
    serve(arguments.rank, group, channel, resolved, reports)


def serve(rank: int, group: TPGroup, channel: Reader, resolved: Any, reports: Connection) -> None:
    """Load a rank's part of a resolved model, reporting as in `rank_main`, and run what rank 0 calls up to its end."""
    from tritonllm.engine.model_runner import ModelRunner

    runner = ModelRunner(resolved.engine, rank, Rank0(group, channel, reports), resolved=resolved)
    reports.send(("ready", None))
    runner.loop()
    channel.close()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        leave(1)


def leave(code: int) -> NoReturn:
    """End this process at once, with what it printed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
