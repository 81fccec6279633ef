"""Tools to test model families against transformers and kernels against references, for us and for everybody else.

The names here are for model families. They need torch and transformers, and neither pytest nor hypothesis: every check
raises AssertionError in plain words.

The modules for kernels need torch and triton, and know nothing of the engine: `strategies` (the one that needs
hypothesis), the inputs that it draws (`paged`, `decode_step`, `sampling_rows`, `tensors`), `tolerances` and `poison`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritonllm.lazy_package import make_lazy

if TYPE_CHECKING:
    from tritonllm.testing.equality import WAYS, assert_ways_agree, complete_alone, register_way, way_engine
    from tritonllm.testing.hf_comparison import assert_engine_matches, assert_matches_hf
    from tritonllm.testing.tiny_models import HEAD_SHAPES, ROPE_RULES, save_tiny_checkpoint, tiny_hf_config
    from tritonllm.testing.tiny_tokenizer import tiny_tokenizer

_HOME = {
    "HEAD_SHAPES": "tritonllm.testing.tiny_models",
    "ROPE_RULES": "tritonllm.testing.tiny_models",
    "WAYS": "tritonllm.testing.equality",
    "assert_engine_matches": "tritonllm.testing.hf_comparison",
    "assert_matches_hf": "tritonllm.testing.hf_comparison",
    "assert_ways_agree": "tritonllm.testing.equality",
    "complete_alone": "tritonllm.testing.equality",
    "register_way": "tritonllm.testing.equality",
    "save_tiny_checkpoint": "tritonllm.testing.tiny_models",
    "tiny_hf_config": "tritonllm.testing.tiny_models",
    "tiny_tokenizer": "tritonllm.testing.tiny_tokenizer",
    "way_engine": "tritonllm.testing.equality",
}

__all__ = [
    "HEAD_SHAPES",
    "ROPE_RULES",
    "WAYS",
    "assert_engine_matches",
    "assert_matches_hf",
    "assert_ways_agree",
    "complete_alone",
    "register_way",
    "save_tiny_checkpoint",
    "tiny_hf_config",
    "tiny_tokenizer",
    "way_engine",
]

make_lazy(__name__, _HOME)
