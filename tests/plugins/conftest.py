"""Real plugin distributions, built and installed offline into a folder, and fresh processes that see them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"

RunPython = Callable[..., Any]


def install(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    folder = tmp_path_factory.mktemp(name)
    # Building writes into the project's folder: leave the source tree clean.
    shutil.copytree(HERE / name, folder / "project")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", folder / "site", folder / "project"], check=True, timeout=120)
    return folder / "site"


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that holds the installed distribution tritonllm-toy."""
    return install(tmp_path_factory, "tritonllm-toy")


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that holds the installed distribution tritonllm-broken."""
    return install(tmp_path_factory, "tritonllm-broken")


@pytest.fixture
def run_python() -> RunPython:
    """Run code in a fresh process that sees the given distributions; returns the value of its name `result`."""

    def run(code: str, *folders: Path, **environment: str) -> Any:
        path = os.pathsep.join(str(folder) for folder in (*folders, SOURCE))
        env = {**os.environ, "PYTHONPATH": path, **environment}
        script = f"{code}\nimport json\nprint(json.dumps(result))"
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
