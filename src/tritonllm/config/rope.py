"""Rotary position embeddings as a value: which scaling rule, over how many of a head's dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tritonllm.config.checks import Rule, check_fields, even, flag, integer, number, one_of, positive_numbers
from tritonllm.errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

_positive = number(0, above=True)
_RULES: dict[str, Rule] = {
    "rope_type": one_of(*ROPE_TYPES),
    "rotary_dim": even(),
    "theta": _positive,
    "factor": _positive,
    "original_max_position": integer(1),
    "low_freq_factor": _positive,
    "high_freq_factor": _positive,
    "beta_fast": _positive,
    "beta_slow": _positive,
    "attention_factor": number(0).or_none(),
    "mscale": number(0).or_none(),
    "mscale_all_dim": number(0).or_none(),
    "truncate": flag(),
    "short_factor": positive_numbers(),
    "long_factor": positive_numbers(),
}


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. Two equal values give equal tables, so a table may be cached by it.

    Attributes:
        rotary_dim: leading dimensions of a head that are rotated, even; the rest passes through.
        original_max_position: positions the model was trained on before its context was extended.
        rope_type: "default", "linear" (positions divided by `factor`), "dynamic" (default up to
            `original_max_position`; longer contexts would change the table as they grow and are refused),
            "llama3" (Llama 3.1's by wavelength), "yarn" (https://arxiv.org/abs/2309.00071) or "longrope"
            (https://arxiv.org/abs/2402.13753: a divisor for each frequency, from one of two sets by the table's size).
        theta: base of the geometric series of frequencies.
        factor: how many times the context was extended (linear, llama3, yarn, longrope).
        low_freq_factor, high_freq_factor: llama3's bounds, in wavelengths per original context.
        beta_fast, beta_slow: yarn's bounds, in rotations per original context.
        attention_factor: yarn's and longrope's factor on cos and sin; None derives it from `factor` (and the two
            mscales).
        mscale, mscale_all_dim: DeepSeek's refinement of that; both or neither have an effect.
        truncate: whether yarn rounds its bounds to whole dimensions.
        short_factor, long_factor: longrope's divisors, `rotary_dim / 2` of each: for tables of at most
            `original_max_position` positions, and for longer ones.
    """

    rotary_dim: int
    original_max_position: int
    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, _RULES, UnsupportedModelError)
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise UnsupportedModelError(
                f"low_freq_factor={self.low_freq_factor} must be below high_freq_factor={self.high_freq_factor}."
            )
        for name in ("short_factor", "long_factor") if self.rope_type == "longrope" else ():
            count = len(getattr(self, name))
            if count != self.rotary_dim // 2:
                raise UnsupportedModelError(
                    f"rope_type='longrope' needs {self.rotary_dim // 2} numbers in {name}, one for each pair of "
                    f"rotated dimensions, not {count}."
                )

    @property
    def max_length(self) -> int | None:
        """Longest context for which one table is that of every shorter text too, None if there is no such limit."""
        return self.original_max_position if self.rope_type in ("dynamic", "longrope") else None

    @property
    def magnitude(self) -> float:
        """Factor on cos and sin; 1 for every type but yarn and longrope."""
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.rope_type == "longrope":
            extended = self.factor > 1
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position)) if extended else 1.0
        if self.mscale and self.mscale_all_dim:
            return _yarn_magnitude(self.factor, self.mscale) / _yarn_magnitude(self.factor, self.mscale_all_dim)
        return _yarn_magnitude(self.factor, 1.0)


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
