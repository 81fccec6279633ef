"""Ranks on this host, spawned by the engine's process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from tritonllm.engine.rank_channel import ChannelWriter
from tritonllm.engine.rank_process import NO_MAIN_GUARD, RankArguments, rank_main
from tritonllm.engine.ranks import Ranks
from tritonllm.engine.resolve import ResolvedModel
from tritonllm.models.collectives import DistributedGroup


class SpawnedRanks(Ranks):
    """Ranks in processes of their own, called through shared memory.

    They meet in a store on a port that the system picks, so any number of engines fit on one host.
    """

    def __init__(self, resolved: ResolvedModel, drop_graphs: Callable[[], None]) -> None:
        _leave_if_imported_again()
        self._processes: list[BaseProcess] = []
        super().__init__(resolved, drop_graphs)

    def _start(self, resolved: ResolvedModel) -> None:
        context = multiprocessing.get_context("spawn")
        self._channel = channel = ChannelWriter(context, self.size - 1)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        device = torch.device("cpu")
        if resolved.engine.device == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        threads = max(1, torch.get_num_threads() // self.size)
        sent = pickle.dumps(replace(resolved, tokenizer=None))
        for rank, events in enumerate(channel.readers, 1):
            index = (device.index + rank) % torch.cuda.device_count() if device.index is not None else 0
            arguments = RankArguments(rank, self.size, store.port, channel.name, events, sent, index, threads)
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=rank_main, args=(arguments, theirs), name=f"tritonllm rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            events.close()
            self._processes.append(process)
            self._reports.append(mine)
        self._sentinels = [process.sentinel for process in self._processes]
        self._watcher.start()
        self._wait_for("here")
        how = resolved.engine.all_reduce
        connect = DistributedGroup.connect
        self.group = self._unless_failed(lambda: connect(0, self.size, store, device, self._check, all_reduce=how))

    def _has_ended(self, rank: int) -> bool:
        return self._processes[rank - 1].exitcode is not None

    def _how_ended(self, rank: int) -> str:
        code = self._processes[rank - 1].exitcode
        if code == NO_MAIN_GUARD:
            return (
                "the script that makes this engine has no main guard: each rank imports it anew and would make an "
                'engine of its own; put what it does under `if __name__ == "__main__":`'
            )
        return f"rank {rank} of {self.size} ended with exit code {code} and no word; make a new engine"

    def _end(self, deadline: float) -> None:
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()

    def _forget(self) -> None:
        self._sentinels = []
        for process in self._processes:
            process.close()
        self._processes.clear()


def _leave_if_imported_again() -> None:
    """End a process that is still importing the script of the engine that spawned it, without a word of its own.

    Python's own answer to a script without a main guard is a traceback in each process, about something else.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(NO_MAIN_GUARD)
