"""Seconds until an engine is ready, in fresh processes: `tritonllm bench startup MODEL`."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tritonllm.config import EngineConfig
from tritonllm.errors import EngineError, TritonLLMError

PARTS = ("import_torch_seconds", "engine_seconds", "first_token_seconds", "process_seconds")


def measure(config: EngineConfig, runs: int, triton_cache: Path | None = None) -> dict[str, Any]:
    """Start two processes a run, one with an empty folder for Triton's cache and one with what that left there.

    With `triton_cache`, such as `tritonllm kernels precompile` fills, both begin with a copy of that folder instead of
    an empty one, and the first of them is called "given".

    The parts of a start are `import torch`; importing tritonllm and making the engine, with its CUDA context, weights,
    kernels and graphs; the first token of a prompt of three; and the process as a whole, Python's own start included.
    Medians of the runs are reported. Nothing of this has a floor.

    Raises:
        EngineError: a process failed; ends with the last line it wrote.
    """
    first = "cold" if triton_cache is None else "given"
    measured: dict[str, list[dict[str, Any]]] = {first: [], "warm": []}
    for _ in range(runs):
        with tempfile.TemporaryDirectory(prefix="tritonllm-bench-") as cache:
            if triton_cache is not None:
                shutil.copytree(triton_cache, cache, dirs_exist_ok=True)
            for started in measured.values():
                started.append(_start(config, cache))
    conditions = measured[first][0]["conditions"]
    return {
        "conditions": conditions,
        "starts": [
            {
                "triton_cache": name,
                **{part: round(statistics.median(run[part] for run in started), 4) for part in PARTS},
                "runs": [{part: round(run[part], 4) for part in PARTS} for run in started],
            }
            for name, started in measured.items()
        ],
    }


def _start(config: EngineConfig, cache: str) -> dict[str, Any]:
    """One start in a process of its own."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tritonllm.bench.startup", json.dumps(config.to_dict())],
        env={**os.environ, "TRITON_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise EngineError(f"the process that starts the engine failed: {said[-1]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "process_seconds": seconds}


def main() -> None:
    """The process that is started: the engine's keys as JSON come in, the seconds go out."""
    start = time.perf_counter()
    import torch  # noqa: F401

    imported = time.perf_counter()
    from tritonllm import LLMEngine, SamplingParams

    try:
        with LLMEngine(json.loads(sys.argv[1])) as llm:
            ready = time.perf_counter()
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
            answered = time.perf_counter()
            from tritonllm.bench.report import conditions

            told = conditions(llm)
    except TritonLLMError as error:
        sys.exit(" ".join(str(error).split()))
    parts = dict(zip(PARTS, (imported - start, ready - imported, answered - ready), strict=False))
    print(json.dumps({**parts, "conditions": told}))


if __name__ == "__main__":
    main()
