"""A cache filled by `kernels precompile`, and Triton's own launch looking kernels up in it.

The launches go through a driver that pretends to be the GPU, in a process of their own, up to where they would run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tritonllm.cli import main
from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

OPTIONS = {"max_num_sequences": 5, "max_num_batched_tokens": 64, "max_model_length": 128, "dtype": "bfloat16"}

PROGRAM = """
import json, sys
import triton
from triton.runtime import driver

from tritonllm import EngineConfig
from tritonllm.engine.recorded_start import recorded_start
from tritonllm.kernels.targets import parse_targets

model, options, name, num_sms = json.loads(sys.argv[1])
(target,) = parse_targets([name], num_sms)


class Pretended:
    def get_current_target(self):
        return target.gpu

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


driver.set_active(Pretended())
found = {True: set(), False: set()}


def listen(src, metadata, metadata_group, times, cache_hit):
    found[cache_hit].add(src.fn.__name__ + metadata["hash"])


triton.knobs.compilation.listener = listen
for launch in recorded_start(EngineConfig(model, **options), target.counts_as):
    launch._compile()
print(json.dumps([sorted(found[True]), sorted(found[False] - found[True])]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_checkpoint(tiny_hf_config("qwen3", heads="4/2x128"), folder, tokenizer=False)
    return str(folder)


def fill(model: str, target: str, out: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """How many kernels the command put into a cache."""
    options = [word for key, value in OPTIONS.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    with pytest.raises(SystemExit) as left:
        main(["kernels", "precompile", "--model", model, "--target", target, "--out", str(out), *options])
    assert not left.value.code
    done, _, all_of_them, *_ = capsys.readouterr().out.split()
    assert done == all_of_them
    return int(done)


def look_up(model: str, target: str, cache: Path, num_sms: int | None = None) -> tuple[list[str], list[str]]:
    """What Triton found in a cache, and what it had to compile."""
    told = json.dumps([model, OPTIONS, target, num_sms])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, told], capture_output=True, text=True, timeout=500, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


@pytest.mark.parametrize("target", ["cuda:90", pytest.param("hip:gfx942", marks=pytest.mark.slow)])
def test_a_start_finds_every_kernel(
    target: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = fill(model, target, tmp_path, capsys)
    there = {path.name for path in tmp_path.iterdir()}
    hits, misses = look_up(model, target, tmp_path)
    assert misses == []
    assert len(hits) == filled > 20
    assert {path.name for path in tmp_path.iterdir()} == there
    # Other multiprocessors share the keys of a sequence otherwise, and would compile.
    hits, misses = look_up(model, target, tmp_path, num_sms=8)
    assert misses
    assert all("attention" in name for name in misses)
