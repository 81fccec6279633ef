"""The RoPE fields of a config.json: `rope_theta` and `rope_scaling` of transformers 4, `rope_parameters` of 5."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from tritonllm.config.checks import Rule, flag, integer, number, positive_numbers
from tritonllm.config.rope import ROPE_TYPES, RopeConfig
from tritonllm.errors import ConfigError, UnsupportedModelError

_positive = number(0, above=True)

# Numbers of a scaling rule, named alike in config.json and in RopeConfig. As in transformers, a number that the rule
# in force does not read has no effect.
_NUMBERS: dict[str, Rule] = {
    "factor": _positive,
    "low_freq_factor": _positive,
    "high_freq_factor": _positive,
    "beta_fast": _positive,
    "beta_slow": _positive,
    "attention_factor": number(0),
    "mscale": number(0),
    "mscale_all_dim": number(0),
    "truncate": flag(),
    "short_factor": positive_numbers(),
    "long_factor": positive_numbers(),
}
_REQUIRED_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),  # its factor may follow from the two lengths
    "longrope": ("short_factor", "long_factor"),  # and so may its
}
_OTHER_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_WITHOUT_EFFECT = ("finetuned",)


def read_rope(fields: Mapping[str, Any], head_dim: int, max_position: int) -> RopeConfig:
    """Read how a checkpoint rotates queries and keys.

    `max_position` is `max_position_embeddings`, of which transformers takes the original length where no other is
    given. Where old and new fields are both there, `rope_scaling` wins, as in transformers.

    Raises:
        ConfigError: a number is missing or malformed.
        UnsupportedModelError: an unknown rule, an unknown field of one, or a rotary size no kernel has.
    """
    source = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    scaling = _flat(source, fields.get(source) or {})
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"The checkpoint's config says rope_type={rope_type!r} in {source}: "
            f"only {', '.join(ROPE_TYPES)} are computed."
        )
    for name, value in scaling.items():
        if value is not None and name not in (*_NUMBERS, *_OTHER_FIELDS, *_WITHOUT_EFFECT):
            raise UnsupportedModelError(
                f"The checkpoint's config says {source}.{name}={reprlib.repr(value)}, which is not computed for "
                f"rope_type={rope_type!r}."
            )
    numbers = {name: _frozen(scaling[name]) for name in _NUMBERS if scaling.get(name) is not None}
    for name, value in numbers.items():
        _NUMBERS[name].check(f"{source}.{name}", value, ConfigError)
    for name in _REQUIRED_NUMBERS[rope_type]:
        if name not in numbers:
            raise ConfigError(f"The checkpoint's config lacks {source}.{name}, which rope_type={rope_type!r} needs.")

    original = _original_max_position(fields, scaling, rope_type, max_position)
    if rope_type in ("yarn", "longrope"):
        numbers.setdefault("factor", max_position / original)
    theta = _first(scaling.get("rope_theta"), fields.get("rope_theta"), 10000.0)
    _positive.check("rope_theta", theta, ConfigError)
    return RopeConfig(
        rotary_dim=_rotary_dim(fields, scaling, head_dim),
        original_max_position=original,
        rope_type=rope_type,
        theta=float(theta),
        **numbers,
    )


def _flat(source: str, scaling: Any) -> Mapping[str, Any]:
    """One rule for all layers, also where the file repeats it for each type of layer."""
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"{source}={reprlib.repr(scaling)} is not valid: give a mapping or null.")
    rules = [value for key, value in scaling.items() if key.endswith("_attention")]
    if not rules:
        return scaling
    if any(not isinstance(rule, Mapping) or rule != rules[0] for rule in rules):
        raise UnsupportedModelError(
            f"The checkpoint's config says {source}={reprlib.repr(scaling)}: "
            "one RoPE for each type of layer is not computed."
        )
    return rules[0]


def _original_max_position(
    fields: Mapping[str, Any], scaling: Mapping[str, Any], rope_type: str, max_position: int
) -> int:
    """As in transformers: the outer field counts before the inner one, and only where the rule extends a context."""
    if rope_type not in ("llama3", "yarn", "longrope"):
        return max_position
    name = "original_max_position_embeddings"
    original = _first(fields.get(name), scaling.get(name), max_position)
    integer(1).check(name, original, ConfigError)
    return original


def _rotary_dim(fields: Mapping[str, Any], scaling: Mapping[str, Any], head_dim: int) -> int:
    share = _first(
        scaling.get("partial_rotary_factor"), fields.get("partial_rotary_factor"), fields.get("rotary_pct"), 1.0
    )
    _positive.check("partial_rotary_factor", share, ConfigError)
    rotary_dim = _first(fields.get("rotary_dim"), int(head_dim * share))
    integer(0).check("rotary_dim", rotary_dim, ConfigError)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise UnsupportedModelError(
            f"rotary_dim={rotary_dim} (partial_rotary_factor={share}) of head_dim={head_dim} cannot be rotated: "
            "it must be even, at least 2, and at most head_dim."
        )
    return rotary_dim


def _frozen(value: Any) -> Any:
    """A list as a tuple, anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def _first(*values: Any) -> Any:
    """The first value that is there."""
    return next((value for value in values if value is not None), None)
