"""Token choice in PyTorch: the rules of `tritonllm.kernels.sampling` with a sort where the kernels search.

Noise words and sums of mass are the integers that the kernels compute; only the rounding of a log or an exp differs.
Work is done for the rows that need it: a greedy row costs one pass for its maximum.
"""

from __future__ import annotations

import torch

from tritonllm.kernels.noise import MAX_TEMPERATURE, MIN_TEMPERATURE, PHILOX_ROUNDS

_WORD = 0xFFFFFFFF
_LOG2_E = 1.4426950408889634
MASS_SCALE = 2.0**40


def philox(counter: list[torch.Tensor], key: tuple[torch.Tensor, torch.Tensor], rounds: int) -> list[torch.Tensor]:
    """Philox4x32 on int64 tensors that hold 32-bit words. Products wrap modulo 2^64, which keeps both halves."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = (product2 >> 32 & _WORD) ^ c1 ^ k0
        c2 = (product0 >> 32 & _WORD) ^ c3 ^ k1
        c1, c3 = product2 & _WORD, product0 & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return [c0, c1, c2, c3]


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, first_id: int = 0) -> torch.Tensor:
    """Noise fp32 [B, V] of the ids from first_id on.

    For seeds int32 [B, 2] (low and high word) and positions int32 [B].
    """
    quads = (first_id // 4 + torch.arange((vocab_size + 3) // 4, device=seeds.device)).expand(len(seeds), -1)
    zeros = torch.zeros_like(quads)
    low, high = (seeds.long() & _WORD).split(1, dim=1)
    words = philox([quads, zeros + (positions.long() & _WORD)[:, None], zeros, zeros], (low, high), PHILOX_ROUNDS.value)
    word = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    v = (word.float() + 0.5) * 2.0**-32
    rest = ((word ^ _WORD).float() + 0.5) * 2.0**-32
    series = v * (v * (v * (v * (v * 0.2 + 0.25) + 1 / 3) + 0.5) + 1)
    return -torch.where(v < 1 / 32, series, -rest.log()).log()


def _kept_from(
    x: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, cut: torch.Tensor
) -> torch.Tensor:
    """Thresholds of rows without NaN that all use a filter: x fp32 [R, V], parameters [R, 1], cut that of min-p."""
    vocab_size = x.shape[1]
    ordered = x.sort(dim=1, descending=True).values
    uses_top_k = (top_k > 0) & (top_k < vocab_size)
    kth = ordered.gather(1, (torch.where(uses_top_k, top_k, vocab_size) - 1).long())
    largest = ordered[:, :1]
    # A row whose maximum is infinite has no difference to it: equal logits count as one, others as nothing.
    distance = torch.where(ordered == largest, 0.0, ordered - largest)
    mass = ((distance * (_LOG2_E / temperature)).exp2() * MASS_SCALE).long()
    reached = torch.where((ordered >= kth) & (ordered >= cut), mass, 0).cumsum(dim=1)
    needed = (top_p.double() * reached[:, -1:].double()).ceil().long().clamp_(min=1)
    last = torch.searchsorted(reached, needed).clamp_(max=vocab_size - 1)
    return torch.maximum(torch.where(top_p < 1, ordered.gather(1, last), kth), cut)[:, 0]


def _min_p_cut(x: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    largest = x.amax(dim=1, keepdim=True)
    cut = largest + temperature * min_p.clamp(1e-37, 1.0).log()
    return torch.where((min_p > 0) & (largest > -torch.inf), cut, -torch.inf)


def kept_threshold(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `tritonllm.kernels.sampling.kept_threshold`."""
    thresholds = torch.full_like(temperatures, -torch.inf, memory_format=torch.contiguous_format)
    thresholds[logits.isnan().any(dim=1)] = torch.nan
    if min_ps is None:
        min_ps = torch.zeros_like(temperatures)
    filters = (top_ps < 1) | ((top_ks > 0) & (top_ks < logits.shape[1])) | (min_ps > 0)
    rows = (filters & (temperatures >= MIN_TEMPERATURE.value) & ~thresholds.isnan()).nonzero()[:, 0]
    if len(rows):
        x = logits[rows].float()
        temperature, top_k, top_p, min_p = (values[rows, None] for values in (temperatures, top_ks, top_ps, min_ps))
        thresholds[rows] = _kept_from(x, temperature, top_k, top_p, _min_p_cut(x, temperature, min_p))
    return thresholds


def _pick(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    thresholds: torch.Tensor | None,
    first_id: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.float()
    random = (temperatures >= MIN_TEMPERATURE.value).nonzero()[:, 0]
    if len(random):
        noise = gumbel_noise(seeds[random], positions[random], logits.shape[1], first_id)
        drawn = scores[random] + temperatures[random, None].clamp(max=MAX_TEMPERATURE.value) * noise
        if thresholds is not None:
            # Not "below": a threshold that is NaN keeps nothing, and the NaN itself has to survive as a score.
            drawn = torch.where(scores[random] < thresholds[random, None], -torch.inf, drawn)
        scores = scores.index_copy(0, random, drawn)
    best, tokens = scores.max(dim=1)  # the first of equal maxima; NaN if there is one
    return best, torch.where(best.isnan(), -1, first_id + tokens).int()


def pick_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Reference of `tritonllm.kernels.sampling.pick_tokens`."""
    return _pick(logits, temperatures, seeds, positions, None)[1]


def pick_from_shard(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `tritonllm.kernels.sampling.pick_from_shard`; the score of a row with NaN is NaN."""
    return _pick(logits, temperatures, seeds, positions, None, first_id)


def merge_picks(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Reference of `tritonllm.kernels.sampling.merge_picks`."""
    best = scores.amax(dim=1, keepdim=True)
    winners = torch.where(scores == best, tokens, torch.iinfo(torch.int32).max).amin(dim=1)
    return torch.where((tokens < 0).any(dim=1), -1, winners).int()


def sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    min_ps: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `tritonllm.kernels.sampling.sample_tokens`."""
    thresholds = kept_threshold(logits, temperatures, top_ks, top_ps, min_ps)
    return _pick(logits, temperatures, seeds, positions, thresholds)[1]
