"""Which rank this process is, where something like torchrun started all of them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tritonllm.errors import ConfigError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class LaunchPlace:
    """This process among those that were started together.

    Attributes:
        rank, size: among all.
        local_rank: on this host, which is the index of its GPU.
        local_size: processes on this host, as far as is known.
        address: of rank 0's host.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str


def launch_place(world_size: int) -> LaunchPlace | None:
    """The place that the environment gives this process, None for an engine that starts its ranks itself.

    Read are the variables that torchrun sets and that torch.distributed's `env://` knows. An engine of one rank does
    not look at them, so processes started together can each have one of their own.

    Raises:
        ConfigError: other than `world_size` processes were started, or a variable is no number.
    """
    given = {name: os.environ.get(name, "") for name in _NEEDED}
    if world_size == 1 or not all(given.values()) or given["WORLD_SIZE"] == "1":
        return None
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if size != world_size:
        raise ConfigError(
            f"world_size={world_size}, but WORLD_SIZE={size} processes were started together: make the two equal, or "
            "unset WORLD_SIZE to have the engine start its ranks itself."
        )
    local_rank = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0
    local_size = _number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else 1
    return LaunchPlace(rank, size, local_rank, local_size, given["MASTER_ADDR"])


def _number(name: str) -> int:
    value = os.environ[name]
    if not value.isdecimal():
        raise ConfigError(
            f"the environment says {name}={value!r}, which is no number: start with torchrun, or unset it."
        )
    return int(value)
