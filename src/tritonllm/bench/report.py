"""What a benchmark says beside its numbers, and the numbers as a table."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tritonllm
from tritonllm.bench.limits import Limits
from tritonllm.bench.timing import Bench, device_name
from tritonllm.config import EngineConfig

if TYPE_CHECKING:
    from tritonllm.engine.llm_engine import LLMEngine

_KEYS = (
    "device",
    "dtype",
    "load_format",
    "max_num_sequences",
    "max_num_batched_tokens",
    "max_prefill_tokens_beside_decode",
    "max_model_length",
    "block_size",
    "max_cached_blocks",
    "enforce_eager",
    "world_size",
    "all_reduce",
)

# Title of a column and the key of its number, for the rows that each benchmark has.
_COLUMNS = {
    "throughput": {
        "output tokens/s": "output_tokens_per_second",
        "floor": "floor_output_tokens_per_second",
        "of it": "fraction",
        "seconds": "seconds",
        "prompt tokens": "prompt_tokens",
        "output tokens": "output_tokens",
        "steps": "steps",
        "preemptions": "preemptions",
    },
    "latency": {
        "batch": "batch",
        "ms a token": "ms_per_token",
        "floor": "floor_ms",
        "of it": "fraction",
        "tokens/s in decode": "decode_tokens_per_second",
        "tokens/s with prompts": "output_tokens_per_second",
    },
    "ttft": {
        "prompt tokens": "prompt_tokens",
        "ms to first token": "ms",
        "floor": "floor_ms",
        "of it": "fraction",
        "tokens/s": "prompt_tokens_per_second",
    },
    "streaming": {
        "streams": "streams",
        "median gap, ms": "median_gap_ms",
        "floor": "floor_ms",
        "of it": "fraction",
        "p99": "p99_gap_ms",
        "over median": "p99_over_median",
        "longest": "longest_gap_ms",
        "prompts": "prompts",
        "ms to first token": "median_ttft_ms",
        "longest to it": "longest_ttft_ms",
        "tokens/s": "output_tokens_per_second",
    },
    "startup": {
        "Triton cache": "triton_cache",
        "import torch, s": "import_torch_seconds",
        "engine, s": "engine_seconds",
        "first token, s": "first_token_seconds",
        "process, s": "process_seconds",
    },
}
_ROWS = {"latency": "batches", "ttft": "lengths", "startup": "starts"}


def run(
    kind: str,
    model: str,
    config: EngineConfig,
    memory_rate: float | None,
    matrix_rate: float | None,
    measure: Callable[[Bench], dict[str, Any]],
) -> dict[str, Any]:
    """The report of a benchmark that runs in one engine: conditions, what floors are made of, and its numbers."""
    with Bench(config, memory_rate, matrix_rate) as bench:
        return {
            "benchmark": kind,
            "model": model,
            "conditions": conditions(bench.llm),
            "floors": floors(bench.limits),
            **measure(bench),
        }


def conditions(llm: LLMEngine) -> dict[str, Any]:
    """What a number depends on: versions, commit, GPU and driver, and the engine's configuration in effect."""
    config = llm.config.to_dict()
    return {**machine(llm.config.device), **{key: config[key] for key in _KEYS}}


def machine(device: str) -> dict[str, Any]:
    """Versions, commit, GPU and driver."""
    import torch
    import triton

    return {
        "tritonllm": tritonllm.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "gpu": device_name(device),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def floors(limits: Limits) -> dict[str, Any]:
    """What the floors are made of."""
    return {
        "rates": None if limits.rates is None else asdict(limits.rates),
        "weight_bytes_per_step": limits.weight_bytes,
        "kv_bytes_per_token": limits.kv_bytes_per_token,
        "linear_parameters": limits.linear_parameters,
        "head_parameters": limits.head_parameters,
    }


def as_text(report: Mapping[str, Any]) -> str:
    """A report for people: what ran where, the benchmark's table, and a table of each profile."""
    told = report["conditions"]
    where = told["gpu"] or told["device"]
    weights = "random weights" if told["load_format"] == "dummy" else "its own weights"
    parts = [
        f"{report['model']} with {weights} in {told['dtype']} on {where}, "
        f"torch {told['torch']}, Triton {told['triton']}, tritonllm {told['tritonllm']}",
        *(_aligned(titles, rows) for titles, rows in _tables(report)),
    ]
    return "\n\n".join(parts)


def _tables(report: Mapping[str, Any]) -> Iterator[tuple[list[str], list[list[str]]]]:
    kind = report["benchmark"]
    rows: Sequence[Mapping[str, Any]] = report[_ROWS[kind]] if kind in _ROWS else [report]
    columns = _COLUMNS[kind]
    yield list(columns), [[_cell(key, row[key]) for key in columns.values()] for row in rows]
    for row in rows:
        profile = row.get("profile")
        if profile and kind == "throughput":
            yield ["where the time goes", "steps", "ms a step", "ms"], list(_workload_rows(profile))
        elif profile:
            yield [f"a step of batch {row['batch']}", "us"], list(_profile_rows(profile))


def _aligned(titles: list[str], rows: list[list[str]]) -> str:
    """The first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (titles, *rows)]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _profile_rows(profile: Mapping[str, Any]) -> Iterator[list[str]]:
    yield ["by the clock", f"{profile['step_us']:,.1f}"]
    for name, microseconds in profile["host_us"].items():
        yield [f"host: {name}", f"{microseconds:,.1f}"]
    if profile["gpu_busy_us"] is not None:
        yield [f"GPU busy (idle {profile['gpu_idle_share']:.1%})", f"{profile['gpu_busy_us']:,.1f}"]
    for kernel in profile["kernels"] or []:
        yield [f"  {kernel['launches_per_step']:g} x {kernel['name'][:60]}", f"{kernel['us_per_step']:,.1f}"]


def _workload_rows(profile: Mapping[str, Any]) -> Iterator[list[str]]:
    yield ["before the first launch", "", "", _cell("ms", profile["before_first_launch_ms"])]
    yield ["until the last prompt is in", "", "", _cell("ms", profile["until_last_prompt_ms"])]
    for line in profile["decode"]:
        yield [f"up to {line['rows']} rows", *(_cell(key, line[key]) for key in ("steps", "ms_per_step", "ms"))]
    yield ["after the last step", "", "", _cell("ms", profile["after_last_step_ms"])]
    yield ["idle between steps, in those above", "", "", _cell("ms", profile["between_steps_ms"])]


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "unknown"
    if key == "fraction":
        return f"{value:.0%}"
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def _commit() -> str | None:
    """The commit that this code is of, where it lies in a repository; "-dirty" if it was changed since."""
    folder = str(Path(tritonllm.__file__).parent)
    if _output("git", "-C", folder, "ls-files", "__init__.py") is None:
        return None  # installed below a repository that is another project's
    return _output("git", "-C", folder, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def _output(*command: str) -> str | None:
    """First line of what a command prints, None if it prints nothing or is not there."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.splitlines()), None)
