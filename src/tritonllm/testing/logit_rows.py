"""Rows of decode state that say something about tokens, drawn at random.

Poison: what a row does not use holds values that would change it, in the words of the mask, behind the entries of the
list of biases and the table of words, and in the columns of penalties that are off.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from tritonllm.kernels.row_layout import (
    CONTEXT_LEN,
    CONTROLS,
    HAS_MASK,
    HAS_PENALTIES,
    HEADER,
    NUM_BAD_WORDS,
    NUM_BIASES,
    REPETITION_PENALTY,
    TOKEN,
)

_WIDTH = 4  # tokens of the longest bad word


@dataclass
class Control:
    """What one row says.

    Attributes:
        context_len: tokens of the sequence; 0 for padding.
        newest: the token that is to be taken in, -1 for none.
        prompt, output: tokens taken in so far.
        penalties: repetition, presence and frequency, or None.
        biases: token to what is added, and the context length below which it is forbidden.
        allowed: the allowed tokens, or None for all.
        bad_words: sequences of up to 4 tokens.
    """

    context_len: int
    newest: int
    prompt: list[int]
    output: list[int]
    penalties: tuple[float, float, float] | None = None
    biases: dict[int, tuple[float, int]] = field(default_factory=dict)
    allowed: set[int] | None = None
    bad_words: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def whole_output(self) -> list[int]:
        """The output once the newest token is taken in."""
        return [*self.output, *([self.newest] if self.newest >= 0 else [])]


class ControlledRows:
    """State of rows, each with a `Control`.

    Args:
        controls: one a row.
        vocab_size: V.
    """

    def __init__(self, controls: list[Control], vocab_size: int) -> None:
        self.controls = controls
        self.vocab_size = vocab_size

    @classmethod
    def random(cls, seed: int, batch: int, vocab_size: int) -> ControlledRows:
        """Rows that use any of penalties, biases, a mask and bad words, over few tokens, so that these meet."""
        draw = random.Random(seed)
        tokens = [draw.randrange(vocab_size) for _ in range(12)]
        return cls([_draw_control(draw, tokens, vocab_size) for _ in range(batch)], vocab_size)

    def headers(self, device: torch.device) -> torch.Tensor:
        """int32 [B, HEADER], as rows of a wider matrix."""
        rows = torch.full((len(self.controls), HEADER + 5), 2**30, dtype=torch.int32)
        for row, control in zip(rows, self.controls, strict=True):
            row[TOKEN], row[CONTEXT_LEN] = control.newest, control.context_len
            row[CONTROLS] = (HAS_PENALTIES if control.penalties else 0) | (
                HAS_MASK if control.allowed is not None else 0
            )
            row[NUM_BIASES], row[NUM_BAD_WORDS] = len(control.biases), len(control.bad_words)
            penalties = torch.tensor(control.penalties or (7.0, 7.0, 7.0))
            row.view(torch.float32)[REPETITION_PENALTY : REPETITION_PENALTY + 3] = penalties
        return rows.to(device)[:, :HEADER]

    def counts(self, device: torch.device) -> torch.Tensor:
        """int16 [B, V]: the words before the newest token is counted."""
        return torch.stack([self._words(control, control.output) for control in self.controls]).to(device)

    def counts_after(self) -> torch.Tensor:
        """int16 [B, V]: the words once it is."""
        words = []
        for control in self.controls:
            counted = control.penalties is not None and control.context_len > 0
            words.append(self._words(control, control.whole_output if counted else control.output))
        return torch.stack(words)

    def masks(self, device: torch.device) -> torch.Tensor:
        """int32 [B, ceil(V / 32)]; random where all tokens are allowed."""
        width = -(-self.vocab_size // 32)
        masks = torch.randint(-(2**31), 2**31 - 1, (len(self.controls), width), dtype=torch.int32)
        for mask, control in zip(masks, self.controls, strict=True):
            if control.allowed is not None:
                words = [sum(1 << (t % 32) for t in control.allowed if t // 32 == word) for word in range(width)]
                mask.copy_(torch.tensor(words).where(torch.tensor(words) < 2**31, torch.tensor(words) - 2**32))
        return masks.to(device)

    def biases(self, device: torch.device) -> torch.Tensor:
        """int32 [B, N, 3], with two entries more than any row uses."""
        biases = torch.zeros(len(self.controls), 2 + max(len(c.biases) for c in self.controls), 3, dtype=torch.int32)
        biases.view(torch.float32)[:, :, 1] = 100.0
        for entries, control in zip(biases, self.controls, strict=True):
            for entry, (token, (bias, min_length)) in zip(entries, control.biases.items(), strict=False):
                entry[0], entry[2] = token, min_length
                entry.view(torch.float32)[1] = bias
        return biases.to(device)

    def bad_words(self, device: torch.device) -> torch.Tensor:
        """int32 [B, M, 4], with two entries more than any row uses, which forbid a token at once."""
        words = torch.full((len(self.controls), 2 + max(len(c.bad_words) for c in self.controls), _WIDTH), -1)
        for entries, control in zip(words, self.controls, strict=True):
            entries[:, 0] = control.newest
            for entry, word in zip(entries, control.bad_words, strict=False):
                entry[: len(word)] = torch.tensor(word[::-1])
        return words.int().to(device)

    def recent(self, device: torch.device) -> torch.Tensor:
        """int32 [B, 4]: the rings before the newest token is taken in."""
        return torch.stack([_ring(control, control.output) for control in self.controls]).to(device)

    def recent_after(self) -> torch.Tensor:
        """int32 [B, 4]: the rings once it is."""
        used = [control.context_len > 0 and bool(control.bad_words) for control in self.controls]
        outputs = [c.whole_output if noted else c.output for c, noted in zip(self.controls, used, strict=True)]
        return torch.stack(list(map(_ring, self.controls, outputs)))

    def _words(self, control: Control, output: list[int]) -> torch.Tensor:
        words = torch.zeros(self.vocab_size, dtype=torch.int32)
        words[control.prompt] = -(2**15)
        for token in output:
            words[token] += 1
        return words.to(torch.int16)


def _draw_control(draw: random.Random, tokens: list[int], vocab_size: int) -> Control:
    control = Control(
        context_len=draw.choice((0, 10, 11, 12)),
        newest=draw.choice((*tokens, -1, -1, -1, -1)),
        prompt=draw.choices(tokens, k=4),
        output=draw.choices(tokens, k=draw.randrange(9)),
    )
    if draw.random() < 0.7:
        control.penalties = draw.choice((0.5, 1.0, 1.3)), draw.choice((-1.5, 0.0, 0.7)), draw.choice((-0.3, 0.0, 2.0))
    if draw.random() < 0.7:
        bias = (0.0, -100.0, 3.5, -float("inf"))
        control.biases = {draw.choice(tokens): (draw.choice(bias), draw.choice((0, 11, 14))) for _ in range(6)}
    if draw.random() < 0.5:
        control.allowed = {*draw.choices(tokens, k=5), draw.randrange(vocab_size), vocab_size - 1}
    if draw.random() < 0.7:
        said = control.whole_output
        for length in draw.choices(range(_WIDTH), k=draw.choice((1, 3, 40))):
            # Every other word is about to be completed, if there is so much output.
            others = said[len(said) - length :] if draw.random() < 0.5 else draw.choices(tokens, k=length)
            control.bad_words.append((*others, draw.choice(tokens)))
    return control


def _ring(control: Control, output: list[int]) -> torch.Tensor:
    """int32 [4]: tokens at their positions; those of the whole output end the sequence."""
    ring = torch.full((_WIDTH,), -1, dtype=torch.int32)
    first = control.context_len - len(control.whole_output)
    for position, token in enumerate(output, first):
        ring[position % _WIDTH] = token
    return ring
