"""What rows say about tokens, on the device: counts for penalties, masks, lists of biases, and bad words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tritonllm.engine.bad_words import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from tritonllm.engine.controls import MAX_BIASES, RowControls, Seen
from tritonllm.engine.upload import float_bits, on_host, upload

_MAX_COUNT = 0x7FFF
_IN_PROMPT = -0x8000


class ControlledRow(NamedTuple):
    """A row that gets controls.

    Attributes:
        row: which.
        controls: what it says.
        seen: the tokens that its penalties have counted; None without penalties.
        recent: the newest of them that are of the output, as a ring; None without bad words.
        mask: int32 words of the tokens that its grammar allows now; None without one, and where they come later.
    """

    row: int
    controls: RowControls
    seen: Seen | None
    recent: tuple[int, ...] | None = None
    mask: bytes | None = None


@dataclass(frozen=True)
class ControlState:
    """State of R rows, in the form that `adjust_logits` takes. What a row does not use may hold anything.

    Attributes:
        counts: int16 `[R, V]`.
        masks: int32 `[R, ceil(V / 32)]`.
        biases: int32 `[R, MAX_BIASES, 3]`.
        bad_words: int32 `[R, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]`.
        recent: int32 `[R, MAX_BAD_WORD_TOKENS]`.
    """

    counts: torch.Tensor
    masks: torch.Tensor
    biases: torch.Tensor
    bad_words: torch.Tensor
    recent: torch.Tensor

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device) -> ControlState:
        """State for as many rows, which holds nothing yet."""
        return cls(
            torch.zeros(num_rows, vocab_size, dtype=torch.int16, device=device),
            torch.zeros(num_rows, -(-vocab_size // 32), dtype=torch.int32, device=device),
            torch.zeros(num_rows, MAX_BIASES, 3, dtype=torch.int32, device=device),
            torch.zeros(num_rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS, dtype=torch.int32, device=device),
            torch.zeros(num_rows, MAX_BAD_WORD_TOKENS, dtype=torch.int32, device=device),
        )

    def first(self, num_rows: int) -> ControlState:
        """The state of the first rows, as views."""
        return ControlState(*(part[:num_rows] for part in vars(self).values()))

    def write(self, rows: Iterable[ControlledRow]) -> None:
        """Write what rows use, in one upload that the host does not wait for, and the masks of rows that have one."""
        counted, places, words = [], [], []
        bias_places, biases = [], []
        word_places, bad_words = [], []
        ringed: list[int] = []
        rings: list[int] = []
        masked = []
        vocab_size, width = self.counts.shape[1], self.masks.shape[1]
        for row, controls, seen, recent, mask in rows:
            if seen is not None:
                tokens, row_words = count_words(*seen)
                counted.append(row)
                places += [np.full(len(tokens), row), tokens]
                words.append(row_words)
            for entry, (token, bias, min_length) in enumerate(controls.biases):
                bias_places.append(row * MAX_BIASES + entry)
                biases += [token, float_bits(bias), min_length]
            for entry, word in enumerate(controls.bad_words):
                word_places.append(row * MAX_BAD_WORDS + entry)
                bad_words += [*reversed(word), *[-1] * (MAX_BAD_WORD_TOKENS - len(word))]
            if recent is not None:
                ringed.append(row)
                rings += recent
            if controls.allowed_token_ids is not None:
                masked.append((row, mask_words(controls.allowed_token_ids, width)))
            if mask is not None:
                masked.append((row, np.frombuffer(bytearray(mask), dtype=np.int32)))
        device = self.counts.device
        where = np.concatenate(places[0::2]) if places else ()
        what = np.concatenate(places[1::2]) if places else ()
        sections = [counted, where, what, np.concatenate(words) if words else (), bias_places, biases]
        sections += [word_places, bad_words, ringed, rings]
        counted_, where_, what_, words_, bias_places_, biases_, *others = upload(sections, device)
        if counted:
            self.counts.index_fill_(0, counted_.long(), 0)
            self.counts.view(-1).index_copy_(0, where_.long() * vocab_size + what_, words_.to(torch.int16))
        if bias_places:
            self.biases.view(-1, 3).index_copy_(0, bias_places_.long(), biases_.view(-1, 3))
        if ringed:
            word_places_, bad_words_, ringed_, rings_ = others
            self.bad_words.view(-1, MAX_BAD_WORD_TOKENS).index_copy_(
                0, word_places_.long(), bad_words_.view(-1, MAX_BAD_WORD_TOKENS)
            )
            self.recent.index_copy_(0, ringed_.long(), rings_.view(-1, MAX_BAD_WORD_TOKENS))
        for row, mask_ in masked:
            self.masks[row].copy_(on_host(mask_, device), non_blocking=True)

    def write_masks(self, masks: Iterable[tuple[int, bytes]], copies: torch.cuda.Stream | None) -> None:
        """Write masks of rows in one upload beside the work of the current stream, which goes on behind it.

        Args:
            masks: rows, each with the words of its mask.
            copies: the stream of the upload, None on a CPU.
        """
        rows, words = zip(*masks, strict=True)
        device = self.masks.device
        joined = bytearray().join([*words, np.array(rows, dtype=np.int32).tobytes()])  # one that torch may write to
        packed = on_host(np.frombuffer(joined, dtype=np.int32), device)
        with torch.cuda.stream(copies):
            uploaded = packed.to(device, non_blocking=True)
        if copies is not None:
            torch.cuda.current_stream(device).wait_event(copies.record_event())
            uploaded.record_stream(torch.cuda.current_stream(device))
        self.masks.index_copy_(0, uploaded[-len(rows) :].long(), uploaded[: -len(rows)].view(len(rows), -1))


def count_words(prompt: list[int], output: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens seen, each once, and the word of each, as `adjust_logits` describes it; both int32."""
    tokens = np.array(prompt + output, dtype=np.int32)
    distinct, place = np.unique(tokens, return_inverse=True)
    counts = np.bincount(place[len(prompt) :], minlength=len(distinct))
    words = np.minimum(counts, _MAX_COUNT).astype(np.int32)
    in_prompt = np.zeros(len(distinct), dtype=bool)
    in_prompt[place[: len(prompt)]] = True
    return distinct, np.where(in_prompt, words + _IN_PROMPT, words)


def mask_words(allowed_token_ids: Iterable[int], width: int) -> np.ndarray:
    """int32 `[width]`, a bit a token, the lowest bit of a word first."""
    bits = np.zeros(32 * width, dtype=np.uint8)
    bits[list(allowed_token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
