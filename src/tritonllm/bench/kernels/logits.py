"""What changes logits before the choice and reads them after it, as cases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from tritonllm import kernels
from tritonllm.bench.kernels.case import Case, Place, Prepared, Timed, Work, different
from tritonllm.kernels import reference
from tritonllm.kernels.row_layout import (
    CONTEXT_LEN,
    CONTROLS,
    FREQUENCY_PENALTY,
    HAS_MASK,
    HAS_PENALTIES,
    HEADER,
    NUM_BAD_WORDS,
    NUM_BIASES,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    TOKEN,
)
from tritonllm.testing.poison import poisoned_memory

_NUM_BIASES = 300  # as many as OpenAI's API takes
_CAPACITY = 1024
_NUM_WORDS = 64
_WORD_CAPACITY = 512, 16  # words and tokens of each


@dataclass(frozen=True)
class AdjustLogits(Case):
    """`adjust_logits` with all penalties, a mask, 300 biases and 64 bad words in every row."""

    op: ClassVar[str] = "adjust_logits"
    vocab_size: int
    batch: int

    def work(self, itemsize: int) -> Work:
        return Work(self.batch * self.vocab_size * (itemsize + 2 + 4 + 1 / 8))

    def prepare(self, place: Place) -> Prepared:
        device, vocab, batch = place.device, self.vocab_size, self.batch
        copies = place.copies(self.work(place.dtype.itemsize).bytes)
        logits = place.normal(copies, batch, vocab, scale=2.5)
        counts = torch.randint(0, 3, (copies, batch, vocab), device=device, dtype=torch.int16)
        masks = torch.randint(-(2**31), 2**31 - 1, (batch, -(-vocab // 32)), device=device, dtype=torch.int32)
        rows = torch.zeros(batch, HEADER, dtype=torch.int32, device=device)
        rows[:, TOKEN], rows[:, CONTEXT_LEN], rows[:, CONTROLS] = -1, 1000, HAS_PENALTIES | HAS_MASK
        floats = rows.view(torch.float32)
        floats[:, REPETITION_PENALTY], floats[:, PRESENCE_PENALTY], floats[:, FREQUENCY_PENALTY] = 1.1, 0.5, 0.2
        num_biases = min(_NUM_BIASES, vocab)
        rows[:, NUM_BIASES] = num_biases
        biases = torch.zeros(batch, _CAPACITY, 3, dtype=torch.int32, device=device)
        biases[:, :num_biases, 0] = torch.randperm(vocab, device=device)[:num_biases].int()
        biases.view(torch.float32)[:, :, 1] = 1.5
        rows[:, NUM_BAD_WORDS] = _NUM_WORDS
        # Of two tokens, half of them behind the newest one of the ring.
        bad_words = torch.full((batch, *_WORD_CAPACITY), -1, dtype=torch.int32, device=device)
        bad_words[:, :, 0] = torch.randint(vocab, _WORD_CAPACITY[:1], device=device)
        bad_words[:, :, 1] = torch.arange(_WORD_CAPACITY[0], device=device) % 2
        recent = torch.zeros(batch, _WORD_CAPACITY[1], dtype=torch.int32, device=device)
        listed = masks, biases, bad_words, recent
        calls = [
            partial(kernels.adjust_logits, x, rows, words, *listed) for x, words in zip(logits, counts, strict=True)
        ]

        def error() -> float:
            with poisoned_memory():
                adjusted = calls[0]()
            return different((adjusted, reference.adjust_logits(logits[0], rows, counts[0], *listed)))

        return Prepared(Timed(calls, error, 0.0))


@dataclass(frozen=True)
class TokenLogprobs(Case):
    """`token_logprobs` of every row, with the 20 likeliest tokens."""

    op: ClassVar[str] = "token_logprobs"
    vocab_size: int
    batch: int
    num_top: int = 20

    def work(self, itemsize: int) -> Work:
        return Work(self.batch * (self.vocab_size * itemsize + 8 * (1 + self.num_top)))

    def prepare(self, place: Place) -> Prepared:
        copies = place.copies(self.work(place.dtype.itemsize).bytes)
        logits = place.normal(copies, self.batch, self.vocab_size, scale=2.5)
        tokens = torch.randint(self.vocab_size, (self.batch,), device=place.device).int()
        wanted = torch.ones_like(tokens)
        calls = [partial(kernels.token_logprobs, x, tokens, wanted, min(self.num_top, self.vocab_size)) for x in logits]

        def error() -> float:
            with poisoned_memory():
                logprobs, ids, ranks = calls[0]()
            exact, right, places = reference.token_logprobs(logits[0], tokens, wanted, ids.shape[1] - 1)
            off = (logprobs - exact).abs().amax().item()
            return max(different((ids, right), (ranks, places)), off if off == off else math.inf)

        return Prepared(Timed(calls, error, 1e-4))
