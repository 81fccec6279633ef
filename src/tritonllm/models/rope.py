"""The table of rotary angles, as transformers computes it.

The order of the float32 operations is that of transformers' `modeling_rope_utils`: at position 60,000 a last-bit
difference in a frequency already turns the angle by several thousandths.
"""

from __future__ import annotations

import math

import torch

from tritonllm.config.rope import RopeConfig
from tritonllm.errors import ConfigError


def rope_table(rope: RopeConfig, max_position: int, device: torch.device | str) -> torch.Tensor:
    """Cosines and sines of all positions, scaled by the rule's magnitude.

    Computed on the CPU and then moved, so that every device and rank holds the same bits.

    Returns:
        float32 `[max_position, rotary_dim]`: the first half of a row holds `cos(position * frequency_i)`, the second
        half the sines, for i in `[0, rotary_dim / 2)`.

    Raises:
        ConfigError: more positions than one table can serve (dynamic RoPE beyond its original length).
    """
    if rope.rope_type == "dynamic" and max_position > rope.original_max_position:
        raise ConfigError(
            f"max_position={max_position} is above the {rope.original_max_position} positions that one table of "
            f"rope_type={rope.rope_type!r} serves: lower it to that."
        )
    positions = torch.arange(max_position, dtype=torch.float32, device="cpu")
    angles = positions[:, None] * inverse_frequencies(rope, max_position)
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * rope.magnitude).to(device)


def inverse_frequencies(rope: RopeConfig, max_position: int = 1) -> torch.Tensor:
    """Radians per position of a table of `max_position` positions, float32 `[rotary_dim / 2]` on the CPU."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32, device="cpu") / rope.rotary_dim
    wavelengths = rope.theta**exponents  # in units of 2 pi positions
    if rope.rope_type == "linear":
        return 1.0 / wavelengths / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, 1.0 / wavelengths)
    if rope.rope_type == "yarn":
        return _yarn(rope, wavelengths)
    if rope.rope_type == "longrope":
        divisors = rope.long_factor if max_position > rope.original_max_position else rope.short_factor
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32, device="cpu") * wavelengths)
    return 1.0 / wavelengths


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1)."""
    length, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    stretched = frequencies / rope.factor
    kept_share = (length / wavelengths - low) / (high - low)
    blended = (1 - kept_share) * frequencies / rope.factor + kept_share * frequencies
    outer = torch.where(wavelengths > length / low, stretched, frequencies)
    between = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(between, blended, outer)


def _yarn(rope: RopeConfig, wavelengths: torch.Tensor) -> torch.Tensor:
    """Dimensions that turn often within the original context are kept, those that turn little are interpolated.

    The ramp between them is linear in the dimension (https://arxiv.org/abs/2309.00071, section 3.2).
    """

    def dimension_of(rotations: float) -> float:
        """Which dimension turns that many times within the original context."""
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return (rope.rotary_dim * math.log(turns)) / (2 * math.log(rope.theta))

    first, last = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    if first == last:
        last += 0.001
    dimensions = torch.arange(rope.rotary_dim // 2, dtype=torch.float32, device="cpu")
    kept_share = 1 - ((dimensions - first) / (last - first)).clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept_share) + 1.0 / wavelengths * kept_share
