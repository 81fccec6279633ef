"""Tools to test a model family against transformers, for this project and for plugin authors.

Needs torch and transformers, and neither pytest nor hypothesis: every check raises AssertionError in plain words.
"""

from tritonllm.testing.equality import WAYS, assert_ways_agree, complete_alone, register_way, way_engine
from tritonllm.testing.hf_comparison import assert_engine_matches, assert_matches_hf
from tritonllm.testing.tiny_models import HEAD_SHAPES, ROPE_RULES, save_tiny_checkpoint, tiny_hf_config
from tritonllm.testing.tiny_tokenizer import tiny_tokenizer

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
