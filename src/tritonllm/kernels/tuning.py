"""Which tuning table decides on a device.

The tables in `tuned/`, one for each compute capability, come with the package; `TRITONLLM_TUNING` names another, which
goes first. What no table has is left to the rules of `skinny_table` and to `UNTUNED_PATHS`. `python -m
tritonllm.bench.linears --tune --write FILE` and `python -m tritonllm.bench.decode_layer --write FILE` make one.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import resources
from pathlib import Path

import torch

from tritonllm.errors import ConfigError
from tritonllm.kernels.launch import nvidia_capability
from tritonllm.kernels.tuning_file import read_json
from tritonllm.kernels.tuning_table import UNTUNED, Tuning


def tuning_of(device: torch.device) -> Tuning:
    """The table that decides on this device. Files and environment are read once in a process.

    Raises:
        ConfigError: `TRITONLLM_TUNING` names a file that is no table.
    """
    return _tuning(nvidia_capability(device))


@cache
def _tuning(capability: tuple[int, int]) -> Tuning:
    named, shipped = named_tuning(), shipped_tuning(capability)
    return shipped if named is None else named.over(shipped)


@cache
def shipped_tuning(capability: tuple[int, int]) -> Tuning:
    """The table that comes with the package for a compute capability, `UNTUNED` if there is none."""
    file = resources.files("tritonllm") / "kernels" / "tuned" / "sm_{}{}.json".format(*capability)
    return read_json(file.read_text(encoding="utf-8"), str(file)) if file.is_file() else UNTUNED


@cache
def named_tuning() -> Tuning | None:
    """The table that `TRITONLLM_TUNING` names, None if it names none.

    Raises:
        ConfigError: the file cannot be read or is no table.
    """
    path = os.environ.get("TRITONLLM_TUNING")
    if not path:
        return None
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"TRITONLLM_TUNING={path!r} cannot be read ({reason}): give a file that "
            "`python -m tritonllm.bench.linears --tune --write FILE` wrote, or unset it."
        ) from error
    return read_json(text, path)
