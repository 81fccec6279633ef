"""What a rank needs of its host's memory while it loads: its shard, and one tensor more."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path

import pytest
import torch

from tritonllm import LLMEngine
from tritonllm.testing import tiny_hf_config

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads Linux's /proc")

MIB = 2**20
LIMITS = {
    "device": "cpu",
    "block_size": 16,
    "max_model_length": 16,
    "max_num_sequences": 1,
    "max_num_batched_tokens": 16,
}


class Memory(threading.Thread):
    """Samples the anonymous memory of rank 1, in bytes: what is mapped from files can be read again at any time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = self.last = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            for process in multiprocessing.active_children():
                self.last = anonymous_bytes(process.pid) or self.last
                self.peak = max(self.peak, self.last)
            time.sleep(0.002)


def anonymous_bytes(process_id: int | None) -> int:
    try:
        lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def save(folder: Path, **sizes: int) -> tuple[int, int]:
    """Save a Llama of random bfloat16 tensors; bytes of all and of the largest."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = tiny_hf_config("llama", **sizes)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    tensors = {name: torch.full(tensor.shape, 0.01, dtype=torch.bfloat16) for name, tensor in shapes.items()}
    folder.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    each = [tensor.nbytes for tensor in tensors.values()]
    return sum(each), max(each)


def memory_of_start(folder: Path) -> Memory:
    memory = Memory()
    memory.start()
    with LLMEngine(str(folder), world_size=2, dtype="bfloat16", **LIMITS):
        time.sleep(0.1)
        memory.stopped.set()
        memory.join()
    return memory


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_a_rank_needs_its_shard_and_one_tensor(tmp_path: Path) -> None:
    save(tmp_path / "small", hidden_size=64)
    sizes = {"hidden_size": 1024, "intermediate_size": 8192, "vocab_size": 60_000, "num_hidden_layers": 4}
    total, largest = save(tmp_path / "large", **sizes)
    assert total > 400 * MIB
    base = memory_of_start(tmp_path / "small").last
    memory = memory_of_start(tmp_path / "large")
    shard = total / 2
    assert 0.95 * shard < memory.last - base < shard + 16 * MIB
    assert memory.peak - base < shard + largest + 16 * MIB
