"""What the two benchmarks that write tuning tables share: checks before anything is measured, and the file."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import triton

from tritonllm.bench.target import shipped_shapes
from tritonllm.errors import ConfigError
from tritonllm.kernels.skinny_form import Form
from tritonllm.kernels.tuning_file import as_json, read_json
from tritonllm.kernels.tuning_table import UNTUNED, LinearKey, PathLimit, Tuning


def read_numbers(parser: argparse.ArgumentParser, option: str, text: str) -> list[int]:
    """The numbers of an option such as "1,8,16"; exits with a sentence if they are none."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        parser.error(f"{option} {text!r} must be numbers with commas between them, for example 1,8,16")


def read_models(parser: argparse.ArgumentParser, text: str) -> list[str]:
    """Names of shipped shapes; exits with a sentence if one is none."""
    models = text.split(",")
    for model in models:
        if model not in shipped_shapes():
            parser.error(f"--models has {model!r}: the shapes are {', '.join(shipped_shapes())}")
    return models


def require_gpu(parser: argparse.ArgumentParser, write: Path | None) -> Tuning:
    """Exit with a sentence where nothing can be measured, or not be written.

    Returns:
        The table in the file of --write as it stands, `UNTUNED` if there is none.
    """
    if write is not None and (write.is_dir() or not write.absolute().parent.is_dir()):
        parser.error(f"--write {str(write)!r} is no file in a folder that exists")
    table = UNTUNED
    if write is not None and write.exists():
        try:
            table = read_json(write.read_text(encoding="utf-8"), str(write))
        except (ConfigError, OSError, ValueError) as error:
            parser.error(f"--write {str(write)!r} is there and cannot be kept: {error}")
    if not torch.cuda.is_available():
        parser.exit(1, "This benchmark needs a CUDA device, and torch sees none.\n")
    gpu = torch.cuda.get_device_name()
    if table is not UNTUNED and table.gpu != gpu:
        parser.error(f"--write {str(write)!r} is a table of {table.gpu!r} and this is {gpu!r}: give another file")
    return table


def write_table(
    file: Path,
    table: Tuning,
    *,
    linears: Mapping[LinearKey, Form] | None = None,
    decode_paths: Mapping[int, tuple[PathLimit, ...]] | None = None,
) -> None:
    """Write a table measured on this GPU today, with what is given in place of what `table` has of that kind."""
    table = replace(
        table,
        gpu=torch.cuda.get_device_name(),
        date=datetime.date.today().isoformat(),
        versions={"torch": torch.__version__, "triton": triton.__version__},
        linears=table.linears if linears is None else linears,
        decode_paths=table.decode_paths if decode_paths is None else decode_paths,
    )
    file.write_text(as_json(table), encoding="utf-8")
    print(
        f"{len(table.linears)} forms and paths of {len(table.decode_paths)} hidden sizes are in {file}: "
        "set TRITONLLM_TUNING to it to use them."
    )
