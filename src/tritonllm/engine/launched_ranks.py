"""Ranks that torchrun started, on this host or on several: rank 0 meets them, the others serve it."""

from __future__ import annotations

import logging
import pickle
import secrets
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from tritonllm.engine.launch_place import LaunchPlace, launch_place
from tritonllm.engine.rank_process import leave, serve
from tritonllm.engine.rank_sockets import (
    SECRET_BYTES,
    SocketReader,
    SocketWriter,
    accept_pairs,
    connect_pair,
    listen,
)
from tritonllm.engine.ranks import Ranks
from tritonllm.engine.resolve import ResolvedModel
from tritonllm.errors import CheckpointError, EngineError
from tritonllm.models.collectives import DistributedGroup
from tritonllm.weights import open_checkpoint

logger = logging.getLogger("tritonllm")
_MEETING = timedelta(minutes=10)


class LaunchedRanks(Ranks):
    """Ranks in processes that torchrun started, called through a TCP connection to each.

    They meet in torchrun's own store. A start serves one engine: its other ranks end with it.

    Raises:
        EngineError: as the class above; or this start has served an engine, or a rank has not come within ten minutes.
    """

    def _start(self, resolved: ResolvedModel) -> None:
        place = launch_place(self.size)
        if place is None or place.rank:
            raise EngineError(f"only rank 0 of {self.size} calls the others; on those LLMEngine(...) serves it")
        device = _device(place, resolved.engine.device)
        store = _store()
        if store.add("engines", 1) > 1:
            raise EngineError(
                "the other ranks of this start have ended with its first engine: start anew, or make one engine do all"
            )
        secret = secrets.token_bytes(SECRET_BYTES)
        with listen() as server:
            store.set("rank 0", f"{server.getsockname()[1]} {secret.hex()}")
            try:
                deadline = time.monotonic() + _MEETING.total_seconds()
                calls, self._reports, address = accept_pairs(server, secret, self.size, deadline)
            except TimeoutError as error:
                raise EngineError(f"{error} within {_MEETING}: look at what they print") from None
        self._sentinels = calls
        self._channel = SocketWriter(calls)
        self._watcher.start()
        self._channel.send(pickle.dumps(_sent(resolved)), self._check)
        self._wait_for("here")
        how = resolved.engine.all_reduce
        connect = DistributedGroup.connect
        self.group = self._unless_failed(lambda: connect(0, self.size, store, device, self._check, address, how))

    def _has_ended(self, rank: int) -> bool:
        return bool(connection.wait([self._sentinels[rank - 1]], 0))

    def _how_ended(self, rank: int) -> str:
        return f"rank {rank} of {self.size} ended without a word, or its host is gone; start all ranks anew"

    def _end(self, deadline: float) -> None:
        for sentinel in self._sentinels:
            connection.wait([sentinel], max(0.0, deadline - time.monotonic()))
        # Who has not left yet does so now, as it sees its connections closed.

    def _forget(self) -> None:
        self._sentinels = []


def serve_launched_rank(place: LaunchPlace) -> NoReturn:
    """Be a rank other than 0: load, serve the calls of rank 0, and end with it.

    Raises:
        SystemExit: rank 0's engine has ended, with status 0. If this rank fails, it reports that to rank 0, prints
            its traceback and ends the process with status 1; so it does when rank 0 is gone.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
    leaving = threading.Event()
    reports: Connection | None = None
    try:
        store = _store()
        port, secret = store.get("rank 0").decode().split()
        calls, reports, address = connect_pair(place.address, int(port), bytes.fromhex(secret), place.rank)
        threading.Thread(target=_end_with_rank_0, args=(place, reports, leaving), daemon=True).start()
        channel = SocketReader(calls)
        resolved = _received(channel.receive())
        reports.send(("here", None))
        device = _device(place, resolved.engine.device)
        how = resolved.engine.all_reduce
        group = DistributedGroup.connect(place.rank, place.size, store, device, address=address, all_reduce=how)
        serve(place.rank, group, channel, resolved, reports)
    except BaseException:
        # Without waiting for peers that may never answer: closed connections tell them.
        text = traceback.format_exc()
        if reports is not None:
            with suppress(OSError):
                reports.send(("failed", (time.time(), text)))
        logger.error("rank %d of %d failed:\n%s", place.rank, place.size, text)
        leave(1)
    leaving.set()
    reports.close()
    sys.exit(0)


def _end_with_rank_0(place: LaunchPlace, reports: Connection, leaving: threading.Event) -> None:
    with suppress(OSError):
        connection.wait([reports])
    if not leaving.is_set():
        logger.error("rank %d of %d ends, as rank 0 failed or is gone", place.rank, place.size)
        leave(1)


def _store() -> dist.Store:
    """The store that torchrun, or torch.distributed's `env://`, gives to all ranks of a start."""
    store, _, _ = next(rendezvous("env://", timeout=_MEETING))
    return dist.PrefixStore("tritonllm", store)


def _device(place: LaunchPlace, kind: str) -> torch.device:
    """This rank's device, which becomes torch's current one if it is a GPU."""
    if kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _sent(resolved: ResolvedModel) -> tuple[ResolvedModel, object]:
    """What other ranks get, and what their checkpoint must say: files are each host's own."""
    checkpoint = resolved.checkpoint
    return replace(resolved, tokenizer=None, checkpoint=None), checkpoint.config if checkpoint is not None else None


def _received(message: bytes) -> ResolvedModel:
    resolved, config = pickle.loads(message)
    if config is None:
        return resolved
    engine = resolved.engine
    checkpoint = open_checkpoint(engine.model_name_or_path, revision=engine.revision)
    if checkpoint.config != config:
        raise CheckpointError(
            f"{checkpoint.path} is another checkpoint here than on the host of rank 0: their config.json differ; "
            "copy the same one to every host."
        )
    return replace(resolved, checkpoint=checkpoint)
