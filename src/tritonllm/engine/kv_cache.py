"""The pool of cache blocks: its layout, its size, and nothing about who uses a block."""

from __future__ import annotations

import os

import torch

from tritonllm.config import ModelConfig
from tritonllm.errors import ConfigError
from tritonllm.models.layers import LayerCache


class KVPool:
    """Keys and values of every layer in one tensor.

    Attributes:
        data: `[2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]`; index 0 holds keys, 1 values.
        layers: the `(keys, values)` views of each layer, as the model takes them.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, config.num_layers, num_blocks, block_size, num_kv_heads, config.head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.layers: list[LayerCache] = [(self.data[0, i], self.data[1, i]) for i in range(config.num_layers)]

    @property
    def num_blocks(self) -> int:
        return self.data.shape[2]

    def zero(self, block_ids: torch.Tensor) -> None:
        """Overwrite whole blocks, int64 `[n]`, with zeros."""
        self.data.index_fill_(2, block_ids, 0)


def bytes_per_block(config: ModelConfig, block_size: int, num_kv_heads: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values."""
    return 2 * config.num_layers * block_size * num_kv_heads * config.head_dim * dtype.itemsize


def blocks_on_gpu(free: int, utilization: float, activations: int, graphs: int, block_bytes: int) -> int:
    """Blocks that fit in device memory.

    Args:
        free: bytes free once the weights are loaded.
        utilization: fraction of them that the engine may take.
        activations: bytes that a warm-up step needed at its peak beyond what it left.
        graphs: bytes that the captured graphs take.
        block_bytes: bytes of one block.

    Raises:
        ConfigError: not even one block fits.
    """
    available = int(free * utilization) - activations - graphs
    num_blocks = available // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"no KV cache block of {block_bytes / 2**20:.1f} MiB fits: {free / 2**30:.2f} GiB are free, "
            f"gpu_memory_utilization = {utilization} of them less {activations / 2**30:.2f} GiB for activations and "
            f"{graphs / 2**30:.2f} GiB for graphs; raise gpu_memory_utilization, or lower max_num_batched_tokens or "
            "max_num_sequences"
        )
    return num_blocks


def blocks_on_cpu(wanted: int, block_bytes: int) -> int:
    """Blocks for `wanted` of them within a quarter of the host's memory, at least one."""
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(wanted, host_bytes // 4 // block_bytes))
