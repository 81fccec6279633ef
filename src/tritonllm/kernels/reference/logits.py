"""Logits changed before the choice, and read after it, in PyTorch: the rules of `logit_controls` and `logprobs`."""

from __future__ import annotations

import torch

from tritonllm.kernels.row_layout import (
    CONTEXT_LEN,
    CONTROLS,
    FREQUENCY_PENALTY,
    HAS_MASK,
    HAS_PENALTIES,
    NUM_BAD_WORDS,
    NUM_BIASES,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    TOKEN,
)

_MAX_COUNT = 0x7FFF


def _count(word: torch.Tensor, token: int) -> None:
    """Count a token in the words [V] of a row, in place."""
    if 0 <= token < len(word) and (int(word[token]) & _MAX_COUNT) < _MAX_COUNT:
        word[token] += 1


def _penalized(x: torch.Tensor, word: torch.Tensor, header: torch.Tensor) -> torch.Tensor:
    floats = header.view(torch.float32)
    repetition, presence, frequency = floats[REPETITION_PENALTY], floats[PRESENCE_PENALTY], floats[FREQUENCY_PENALTY]
    x = torch.where(word != 0, torch.where(x > 0, x / repetition, x * repetition), x)
    count = word.int() & _MAX_COUNT
    # One rounding for both: a product of two floats is exact in float64, and so is its sum with x but for a last bit.
    fewer = (x.double() - frequency.double() * count).float() - presence
    return torch.where(count > 0, fewer, x)


def _forbidden_by_words(words: torch.Tensor, recent: torch.Tensor, context_len: int, newest: int) -> torch.Tensor:
    """Tokens that would complete one of the words [M, W]; takes the newest token into the ring [W], in place."""
    width = len(recent)
    if newest >= 0:
        recent[(context_len - 1) % width] = newest
    before = [int(recent[(context_len - back) % width]) if back <= context_len else -1 for back in range(1, width)]
    others = words[:, 1:]
    fits = ((others < 0) | (others == torch.tensor(before, dtype=words.dtype, device=words.device))).all(dim=1)
    return words[fits, 0].long()


def adjust_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    masks: torch.Tensor,
    biases: torch.Tensor,
    bad_words: torch.Tensor,
    recent: torch.Tensor,
) -> torch.Tensor:
    """Reference of `tritonllm.kernels.logit_controls.adjust_logits`; changes counts and recent as well."""
    out = logits.to(torch.float32, copy=True)
    headers = rows[:, : NUM_BAD_WORDS + 1].tolist()
    for row, header in enumerate(headers):
        x, controls, context_len = out[row], header[CONTROLS], header[CONTEXT_LEN]
        if context_len <= 0:
            continue
        forbidden = torch.zeros_like(x, dtype=torch.bool)
        if header[NUM_BIASES]:
            token, bits, min_length = biases[row, : header[NUM_BIASES]].unbind(1)
            inside = (token >= 0) & (token < len(x))
            token, bias, min_length = token[inside].long(), bits[inside].view(torch.float32), min_length[inside]
            banned = (bias == -torch.inf) | (context_len < min_length)
            forbidden[token] = banned
            x[token] += torch.where(banned, 0.0, bias)
        if controls & HAS_PENALTIES:
            _count(counts[row], header[TOKEN])
            x.copy_(_penalized(x, counts[row], rows[row]))
        if controls & HAS_MASK:
            bit = torch.arange(32, dtype=torch.int32, device=x.device)
            forbidden |= ((masks[row, :, None] >> bit) & 1).flatten()[: len(x)] == 0
        if header[NUM_BAD_WORDS]:
            words = bad_words[row, : header[NUM_BAD_WORDS]]
            ends = _forbidden_by_words(words, recent[row], context_len, header[TOKEN])
            forbidden[ends[(ends >= 0) & (ends < len(x))]] = True
        x[forbidden & ~x.isnan()] = -torch.inf
    return out


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference of `tritonllm.kernels.logprobs.token_logprobs`."""
    batch, vocab_size = logits.shape
    logprobs = torch.full((batch, 1 + num_top), torch.nan, device=logits.device)
    ids = torch.full((batch, 1 + num_top), -1, dtype=torch.int32, device=logits.device)
    ranks = torch.zeros(batch, dtype=torch.int32, device=logits.device)
    rows = (wanted > 0).nonzero()[:, 0]
    if not len(rows):
        return logprobs, ids, ranks
    x, token = logits[rows].float(), tokens[rows].long()
    known = (token >= 0) & (token < vocab_size)
    chosen = torch.where(known[:, None], x.gather(1, token.clamp(0, vocab_size - 1)[:, None]), torch.nan)
    # Sorted in float64, as the sum is: the order is that of the logits, and a stable sort keeps ids in theirs.
    ordered, order = x.double().sort(dim=1, descending=True, stable=True)
    top = torch.cat([chosen.double(), ordered[:, :num_top]], dim=1)
    normalizer = ordered[:, :1] + (ordered - ordered[:, :1]).exp().sum(dim=1, keepdim=True).log()
    logprobs[rows] = (top - normalizer).float()
    ids[rows] = torch.cat([torch.where(known, token, -1)[:, None], order[:, :num_top]], dim=1).int()
    ranks[rows] = torch.where(known, (x > chosen).sum(dim=1) + 1, 0).int()
    return logprobs, ids, ranks
