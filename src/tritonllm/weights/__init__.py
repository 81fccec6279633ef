"""Checkpoints: finding them, streaming their tensors, and filling a model with them."""

from tritonllm.weights.checkpoint import Checkpoint, SafetensorsCheckpoint, meta_tensors
from tritonllm.weights.dummy import dummy_weights
from tritonllm.weights.gguf_checkpoint import GgufCheckpoint
from tritonllm.weights.load import LoadReport, load_weights
from tritonllm.weights.resolve import open_checkpoint

__all__ = [
    "Checkpoint",
    "GgufCheckpoint",
    "LoadReport",
    "SafetensorsCheckpoint",
    "dummy_weights",
    "load_weights",
    "meta_tensors",
    "open_checkpoint",
]
