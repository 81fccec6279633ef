"""A pure-Triton LLM inference engine for Hugging Face checkpoints.

Public names are imported when first used, so `import tritonllm` loads neither torch nor triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritonllm.lazy_package import make_lazy

if TYPE_CHECKING:
    from tritonllm.config import EngineConfig, ModelConfig, RopeConfig
    from tritonllm.engine.async_llm_engine import AsyncLLMEngine
    from tritonllm.engine.block_manager import BlockManager
    from tritonllm.engine.llm_engine import LLMEngine
    from tritonllm.engine.model_runner import ModelRunner
    from tritonllm.engine.outputs import RequestOutput, StreamOutput
    from tritonllm.engine.scheduler import Scheduler
    from tritonllm.engine.sequence import Sequence
    from tritonllm.hookspecs import ModelSpec, hookimpl
    from tritonllm.registry import register
    from tritonllm.sampling_params import SamplingParams
    from tritonllm.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

_HOME = {
    "AsyncLLMEngine": "tritonllm.engine.async_llm_engine",
    "BlockManager": "tritonllm.engine.block_manager",
    "EngineConfig": "tritonllm.config",
    "LLMEngine": "tritonllm.engine.llm_engine",
    "ModelConfig": "tritonllm.config",
    "ModelRunner": "tritonllm.engine.model_runner",
    "ModelSpec": "tritonllm.hookspecs",
    "RequestOutput": "tritonllm.engine.outputs",
    "RopeConfig": "tritonllm.config",
    "SamplingParams": "tritonllm.sampling_params",
    "Scheduler": "tritonllm.engine.scheduler",
    "Sequence": "tritonllm.engine.sequence",
    "StreamOutput": "tritonllm.engine.outputs",
    "StructuredOutputsParams": "tritonllm.structured_outputs",
    "hookimpl": "tritonllm.hookspecs",
    "register": "tritonllm.registry",
}

__all__ = [
    "AsyncLLMEngine",
    "BlockManager",
    "EngineConfig",
    "LLMEngine",
    "ModelConfig",
    "ModelRunner",
    "ModelSpec",
    "RequestOutput",
    "RopeConfig",
    "SamplingParams",
    "Scheduler",
    "Sequence",
    "StreamOutput",
    "StructuredOutputsParams",
    "__version__",
    "hookimpl",
    "register",
]

make_lazy(__name__, _HOME)
