"""Gumbel noise that is a pure function of (seed, position, token id): the only randomness in sampling.

    word = Philox4x32-7(counter = (id // 4, position, 0, 0), key = (seed low, seed high))[id % 4]
    g(word) = -log(E),  E = -log(1 - v),  v = (word + 1/2) / 2^32

The token with the largest  logit + temperature * g  is a draw from softmax(logits / temperature). Nothing is carried
from step to step, so a draw depends neither on the batch around it, nor on tiles, nor on what was drawn before; one
Philox call serves four neighbouring ids.

The product form never overflows, however small the temperature is, and needs neither the maximum nor the sum of a row.
A noise value lies between -3.14 and 22.9 (32 random bits): a token that leads by more than 26.1 * temperature always
wins. The sum is fp32, so the noise is resolved to ULP(logit) / temperature. For logits of tens that becomes coarse
under about 1e-3: equal logits lean towards the lowest id, which takes all below `MIN_TEMPERATURE`.

NVIDIA GPUs take the logs from their special function unit (PTX ISA, "lg2.approx": 2^-22), which puts up to 6e-6 on a
noise value: far less than what 32 bits of randomness leave open, and a third of the time.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011); its 7-round variant passes
BigCrush. Gumbel-max: Maddison, Tarlow, Minka, "A* Sampling" (2014).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonllm.kernels.launch import nvidia_capability

MIN_TEMPERATURE = tl.constexpr(1e-5)
"""A row below this temperature (or not a number) is greedy: the noise would be lost in the rounding of the logits."""
MAX_TEMPERATURE = tl.constexpr(1e30)
"""Higher temperatures count as this one, at which the noise alone decides and sums cannot overflow."""
PHILOX_ROUNDS = tl.constexpr(7)

_TWO_TO_MINUS_32 = tl.constexpr(2.0**-32)
_LOG_2 = tl.constexpr(0.6931471805599453)


def has_hardware_log(device: torch.device) -> bool:
    """Whether kernels on this device take logs, and powers, from NVIDIA's special function unit."""
    return nvidia_capability(device) > (0, 0)


@triton.jit
def _log(x, HARDWARE_LOG: tl.constexpr):
    if HARDWARE_LOG:
        # No argument is subnormal: without ".ftz" each would be scaled for that case first.
        instruction: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        return _LOG_2 * tl.inline_asm_elementwise(instruction, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.log(x)


@triton.jit
def _gumbel(word, HARDWARE_LOG: tl.constexpr):
    # Each side of 1/32 keeps the relative precision of a small E: a series in v, or a log away from 1. The
    # multiply-adds are spelled out so that the compiler's choice of fusing cannot make two kernels differ.
    v = (word.to(tl.float32) + 0.5) * _TWO_TO_MINUS_32
    rest = ((~word).to(tl.float32) + 0.5) * _TWO_TO_MINUS_32  # 1 - v
    series = tl.fma(v, 0.2, 0.25)
    series = tl.fma(v, series, 1.0 / 3.0)
    series = tl.fma(v, series, 0.5)
    series = v * tl.fma(v, series, 1.0)
    return -_log(tl.where(v < 0.03125, series, -_log(rest, HARDWARE_LOG)), HARDWARE_LOG)


@triton.jit
def _words(seed_low, seed_high, position, quad):
    """The words of ids 4 q, 4 q + 1, 4 q + 2 and 4 q + 3 for each q of quad, uint32 of any shape."""
    zero = quad * 0
    return tl.philox_impl(
        quad,
        zero + position.to(tl.uint32),
        zero,
        zero,
        zero + seed_low.to(tl.uint32),
        zero + seed_high.to(tl.uint32),
        PHILOX_ROUNDS,
    )


@triton.jit
def gumbel_rows(
    seed_low, seed_high, position, first_id, ROWS: tl.constexpr, WIDTH: tl.constexpr, HARDWARE_LOG: tl.constexpr
):
    """Noise fp32 [ROWS, WIDTH] of the tokens first_id, first_id + 1, ...; first_id and WIDTH are multiples of 4."""
    quad = tl.arange(0, ROWS)[:, None] * (WIDTH // 4) + tl.arange(0, WIDTH // 4)[None, :]
    a, b, c, d = _words(seed_low, seed_high, position, (first_id // 4 + quad).to(tl.uint32))
    # Flattened, the last axes of the joins enumerate a, b, c, d.
    words = tl.join(tl.join(a, c), tl.join(b, d))  # [ROWS, WIDTH / 4, 2, 2]
    return _gumbel(tl.reshape(words, [ROWS, WIDTH]), HARDWARE_LOG)


@triton.jit
def gumbel_tile(seed_low, seed_high, position, first_id, TILE: tl.constexpr, HARDWARE_LOG: tl.constexpr):
    """Noise fp32 [TILE] of the tokens first_id, first_id + 1, ...; first_id and TILE are multiples of 4."""
    quad = (first_id // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)  # [TILE / 4]
    a, b, c, d = _words(seed_low, seed_high, position, quad)
    words = tl.join(tl.join(a, c), tl.join(b, d))  # [TILE / 4, 2, 2]
    return _gumbel(tl.reshape(words, [TILE]), HARDWARE_LOG)


@triton.jit
def gumbel_ids(seed_low, seed_high, position, ids, HARDWARE_LOG: tl.constexpr):
    """Noise of ids int32 in any order, a Philox call each."""
    quad = (ids >> 2).to(tl.uint32)
    a, b, c, d = _words(seed_low, seed_high, position, quad)
    even, odd = tl.where((ids & 2) > 0, c, a), tl.where((ids & 2) > 0, d, b)
    return _gumbel(tl.where((ids & 1) > 0, odd, even), HARDWARE_LOG)


@triton.jit
def perturb(logits, temperature, noise):
    """logits + temperature * noise in one rounding, all fp32, temperature a scalar. Infinite logits stay."""
    scale = tl.full(logits.shape, 0.0, tl.float32) + tl.minimum(temperature, MAX_TEMPERATURE)
    return tl.fma(scale, noise, logits)
