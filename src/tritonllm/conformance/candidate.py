"""What is tested: a family, and a tiny checkpoint of it with the transformers model of the same weights."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tritonllm.engine.llm_engine import LLMEngine
from tritonllm.hookspecs import ModelSpec
from tritonllm.sampling_params import SamplingParams
from tritonllm.testing.equality import complete_alone, greedy
from tritonllm.testing.hf_comparison import reference_config
from tritonllm.testing.tiny_models import save_tiny_checkpoint

NUM_TOKENS = 24
PROMPT_LENGTHS = (17, 50, 55, 33, 64)
LONGEST = max(PROMPT_LENGTHS) + NUM_TOKENS

EPSILON = 0.01
"""Of every norm of a twin. A usual epsilon leaves no trace in float32, so a wrong one would pass."""

ROPE_THETAS = (700.0, 1300.0)
"""Rotary bases of a twin, no model's own: one, or one a kind of layer. Who ignores the field has another."""

WINDOW = 20
"""Sliding window of a twin that has one: shorter than the prompts, and no multiple of a block."""

FACTORS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logit_scale",
    "logits_scaling",
    "query_pre_attn_scalar",
    "residual_multiplier",
)
"""Fields of a twin that are made larger by half, if its config has them. Who fixes them in code has another value."""

CAPS = {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 3.0}
"""Caps of a twin that has them. What a tiny model computes is too small to show whether a usual one is there."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A family under test.

    Attributes:
        spec: the family, which the engine is given: the twin's own architecture is not looked up.
        folder: the twin's checkpoint.
        twin: the transformers model of these weights, float32, on the CPU.
        prompts: token ids; the second and third share 48, which is three blocks of the cache.
        device: where the engine runs.
        checkpoint: a real checkpoint of the family, whose tensors are only looked at; or None.
    """

    spec: ModelSpec
    folder: str
    twin: Any
    prompts: list[list[int]]
    device: str
    checkpoint: str | None = None

    @property
    def keys(self) -> dict[str, Any]:
        """Engine keys that every check uses."""
        return {"dtype": "float32", "device": self.device, "spec": self.spec}

    @property
    def params(self) -> list[SamplingParams]:
        """Greedy, one a prompt."""
        return [greedy(NUM_TOKENS)] * len(self.prompts)

    @functools.cached_property
    def alone(self) -> list[list[int]]:
        """Each prompt's completion in an engine of its own: what every other way is compared with."""
        return complete_alone(self.folder, self.prompts, self.params, self.keys)

    @functools.cached_property
    def alone_on_cpu(self) -> list[list[int]]:
        """The same on the CPU, where there are always two ranks."""
        if torch.cuda.device_count() == 0:
            return self.alone
        return complete_alone(self.folder, self.prompts, self.params, {**self.keys, "device": "cpu"})

    @functools.cached_property
    def loading_error(self) -> Exception | None:
        """Why no engine can be made, if none can."""
        try:
            self.engine().exit()
        except Exception as error:
            return error
        return None

    def engine(self) -> LLMEngine:
        """An engine with room for one prompt."""
        return LLMEngine(
            self.folder,
            **self.keys,
            block_size=16,
            max_model_length=LONGEST,
            max_num_sequences=1,
            max_num_batched_tokens=LONGEST,
            max_cached_blocks=-(-LONGEST // 16),
        )


def make_candidate(
    spec: ModelSpec, folder: str | os.PathLike[str], device: str = "auto", checkpoint: str | None = None
) -> Candidate:
    """Write the twin of a family into a folder.

    Raises:
        PluginError: the spec's `reference` cannot be imported.
        ValueError: there is no reference, or its positions or vocabulary are too few.
    """
    config = telling_config(reference_config(spec))
    vocabulary, positions = config.vocab_size, config.max_position_embeddings
    if positions < LONGEST or vocabulary < 16:
        raise ValueError(
            f"the reference of {spec.name!r} has max_position_embeddings={positions} and vocab_size={vocabulary}: "
            f"the kit needs {LONGEST} positions and 16 ids"
        )
    twin = save_tiny_checkpoint(config, folder, tokenizer=False)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (len(PROMPT_LENGTHS), max(PROMPT_LENGTHS)), generator=generator)
    ids[2, :48] = ids[1, :48]
    prompts = [row[:length].tolist() for row, length in zip(ids, PROMPT_LENGTHS, strict=True)]
    return Candidate(spec, os.fspath(folder), twin, prompts, device, checkpoint)


@contextmanager
def one_thread() -> Iterator[None]:
    """Models this small spend their time waiting for threads, not computing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def telling_config(config: Any) -> Any:
    """A copy of a transformers config in which fields that models like to fix have unusual values.

    A sliding window is short enough to matter, and of layers that may have one the last has none.
    """
    config = type(config).from_dict(config.to_dict())
    for field in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"):
        if getattr(config, field, None) is not None:
            setattr(config, field, EPSILON)
    for field in FACTORS:
        value = getattr(config, field, None)
        if isinstance(value, (int, float)):
            setattr(config, field, type(value)(1.5 * value))
    for field, cap in CAPS.items():
        if getattr(config, field, None):
            setattr(config, field, cap)
    thetas = iter(ROPE_THETAS)
    parameters = getattr(config, "rope_parameters", None)  # transformers 5, one set or one a kind of layer
    sets = [parameters] if parameters and "rope_theta" in parameters else list((parameters or {}).values())
    for rope in sets:
        if isinstance(rope, dict) and "rope_theta" in rope:
            rope["rope_theta"] = next(thetas, ROPE_THETAS[-1])
    for field in ("rope_theta", "rope_local_base_freq"):  # transformers 4
        if not sets and getattr(config, field, None) is not None:
            setattr(config, field, next(thetas))
    kinds = list(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in kinds:
        config.layer_types = [*kinds[:-1], "full_attention"] if len(set(kinds)) == 1 else kinds
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds or window:
        config.sliding_window = min(window or WINDOW, WINDOW)
    return config
