"""A tiny model that several tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(scope="session")
def _one_thread() -> Iterator[None]:
    """Models this small spend their time waiting for threads, not computing."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama(_one_thread, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random Llama of two layers with a tokenizer: id 0 is BOS, id 1 EOS, 512 ids in all."""
    from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

    folder = tmp_path_factory.mktemp("llama") / "tiny"
    save_tiny_checkpoint(tiny_hf_config("llama"), folder)
    return str(folder)


@pytest.fixture
def make_engine(llama: str) -> Iterator[Callable]:
    """`make_engine(**keys)`: an engine on the tiny Llama with small limits; closed after the test."""
    from tritonllm import LLMEngine

    engines = []

    def make(**keys):
        sized = {"block_size": 16, "max_model_length": 96, "max_num_sequences": 4, "max_num_batched_tokens": 64}
        engines.append(LLMEngine({"model_name_or_path": llama, "device": "cpu", **sized, **keys}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.exit()


@pytest.fixture
def engine(make_engine):
    """One such engine, of a test's own."""
    return make_engine()
