"""Checkpoints that several tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Models this small spend their time waiting for threads, not computing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, Any]]:
    """`tiny(family, **tiny_hf_config_arguments)`: folder and transformers twin of a checkpoint, made once a session."""
    made: dict[tuple, tuple[str, Any]] = {}

    def make(family: str, **arguments: Any) -> tuple[str, Any]:
        key = (family, *sorted(arguments.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(family) / "tiny"
            made[key] = str(folder), save_tiny_checkpoint(tiny_hf_config(family, **arguments), folder)
        return made[key]

    return make
