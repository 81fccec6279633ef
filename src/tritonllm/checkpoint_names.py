"""The name under which a checkpoint is looked up, from a path, a hub id or a file."""

from __future__ import annotations

import os
import re

_QUANTIZATION = re.compile(
    r"[.-](UD-)?(I?Q\d+(_[A-Z0-9]+)*|TQ\d+_\d+|MXFP4(_MOE)?|BF16|F16|F32|FP16|FP32)$", re.IGNORECASE
)


def checkpoint_keys(name_or_path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The names under which a checkpoint is looked up, most specific first.

    One name for a folder, a hub id or a folder of the hub's cache; for a `.gguf` file its stem, and its stem without
    the quantization suffix.
    """
    path = os.fspath(name_or_path).replace("\\", "/").rstrip("/")
    parts = [part for part in path.split("/") if part != "."]
    if not parts or parts[-1] == "..":
        parts = os.path.abspath(path or "/").split("/")
    name = parts[-1]
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        name = parts[-3]
    if name.startswith("models--"):
        return (name.split("--")[-1],)
    if name.lower().endswith(".gguf"):
        stem = name[: -len(".gguf")]
        return tuple(dict.fromkeys((stem, _QUANTIZATION.sub("", stem))))
    return (name,)


def checkpoint_key(name_or_path: str | os.PathLike[str]) -> str:
    """The checkpoint's name: "Qwen3-0.6B" for "Qwen/Qwen3-0.6B", for a local folder and for the hub's cache folder."""
    return checkpoint_keys(name_or_path)[-1]
