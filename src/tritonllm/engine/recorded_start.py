"""What the start of an engine launches on a GPU that need not be there."""

from __future__ import annotations

import torch

from tritonllm.config import EngineConfig
from tritonllm.engine.model_runner import ModelRunner
from tritonllm.engine.resolve import resolve_model
from tritonllm.errors import ConfigError
from tritonllm.kernels.launch import Launch, interpreting
from tritonllm.kernels.recording import GPU, recording

_LARGE_POOL = 2**32  # bytes; Triton compiles kernels of their own for tensors above 2 GiB on AMD


class _RecordedRunner(ModelRunner):
    """A runner on meta tensors that goes through every step of a start on the way."""

    def _make_pool(self) -> None:
        few, many = 2, self.config.max_cached_blocks or -(-_LARGE_POOL // self._block_bytes)
        with torch.inference_mode():
            for self.num_blocks in (few, many):  # a start has one of two blocks before it knows how many there can be
                self.pool = self._new_pool(self.num_blocks)
                self._decode_every_size()
                self._prefill_every_kernel()
                self.prefill_graphs.run_every_layout()


def recorded_start(config: EngineConfig, gpu: GPU) -> list[Launch]:
    """Every launch of an engine's start, in order, which has all kernels that it ever runs.

    The model's own code makes them, a plugin's too. Of its checkpoint only the configuration is read. Kernels that a
    model launches by other ways than `Launch` are not seen.

    Raises:
        ConfigError, CheckpointError, UnknownModelError: as `resolve_model`; or kernels are interpreted in this process.
    """
    if interpreting():
        raise ConfigError("kernels cannot be compiled in Triton's interpreter: unset TRITON_INTERPRET")
    resolved = resolve_model(config, recorded=True)
    with recording(gpu) as launches:
        _RecordedRunner(config, resolved=resolved)
    return launches
