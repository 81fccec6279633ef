"""Grammars that completions have to follow, compiled and matched by llguidance (the extra `structured`)."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np

from tritonllm.engine.control_state import mask_words
from tritonllm.errors import RequestError
from tritonllm.sampling_params import SamplingParams
from tritonllm.structured_outputs import StructuredOutputsParams

_KEPT = 64
"""Compiled grammars that are kept for further requests."""

_SHOWN = 200
"""Characters of a grammar in an error."""

_MEANINGS = {"NoExtensionBias": "no text can complete it; give every rule an alternative that comes to an end"}
"""What llguidance says in names of its own."""


class GrammarMatcher:
    """Where one completion stands in its grammar.

    A token once chosen stays, so this lives as long as its sequence, through preemptions too.

    Args:
        matcher: an `llguidance.LLMatcher` at the start of the grammar, of its own.
        width: int32 words of the masks it fills.
        vocabulary: int32 words of the model's ids; masks are cut to them, and ids beyond are forbidden.
        min_tokens: tokens before which the text does not end if the grammar lets it go on.
        eos_token_ids: of the model; llguidance allows one of them where the grammar may end.
        stop_token_ids: what else ends the text: there, and wherever the grammar goes on with such a token.

    Attributes:
        num_tokens: of the completion, taken in.
    """

    def __init__(
        self,
        matcher: Any,
        width: int,
        vocabulary: np.ndarray,
        min_tokens: int,
        eos_token_ids: Collection[int],
        stop_token_ids: Collection[int] = (),
    ) -> None:
        self._matcher = matcher
        self._num_words = len(vocabulary)
        self._words = np.zeros(max(width, self._num_words), dtype=np.int32)
        self._filled = self._words[:width]
        self._vocabulary = vocabulary
        self._min_tokens = min_tokens
        self._complete = _mask_within(eos_token_ids, vocabulary)
        self._ends = self._complete | _mask_within(stop_token_ids, vocabulary)
        self.num_tokens = 0

    def accept(self, token_ids: list[int]) -> str | None:
        """Take in the tokens that came since the last call; why the text cannot go on, None if it can."""
        for token in token_ids:
            self.num_tokens += 1
            if not self._matcher.consume_token(token):
                break
        return self.error

    def mask(self) -> bytes:
        """int32 words `[ceil(vocab_size / 32)]`: the tokens that may come next, a bit a token, the lowest bit first.

        The ids that end the text are among them where the grammar may end, and alone where it must, or where it has
        failed (`error`).
        """
        self._matcher.unsafe_compute_mask_ptr(self._filled.ctypes.data, self._filled.nbytes)
        allowed = self._words[: self._num_words] & self._vocabulary
        if (allowed & self._complete).any():  # llguidance knows those of the model alone
            allowed |= self._ends
        if self.num_tokens < self._min_tokens:
            longer = allowed & ~self._ends
            allowed = longer if longer.any() else allowed
        return allowed.tobytes()

    @property
    def error(self) -> str | None:
        """Why the text cannot go on, None if it can."""
        if not self._matcher.is_error():
            return None
        return f"the grammar cannot go on behind token {self.num_tokens}: {_first_line(self._matcher.get_error())}"


class Grammars:
    """Compiles the grammars of requests for one tokenizer and keeps the latest.

    Args:
        tokenizer: a fast transformers tokenizer; any other, and None, is refused by the first request with a grammar.
        vocab_size: of the model.
        eos_token_ids: ids that end a text where its grammar allows it.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary = mask_words(range(vocab_size), -(-vocab_size // 32))
        self._ll_tokenizer: Any = None  # made by the first request that needs it: it takes a moment
        self._compiled = lru_cache(_KEPT)(self._compile)

    def check(self, params: SamplingParams) -> None:
        """Compile the grammar of a request, if it has one.

        Raises:
            RequestError: llguidance is not installed, does not know the tokenizer, or refuses the grammar.
        """
        if params.structured_outputs is not None:
            self._compiled(params.structured_outputs)

    def matcher(self, params: SamplingParams) -> GrammarMatcher | None:
        """A matcher for one completion of a request, None if that has no grammar. Raises as `check`."""
        if params.structured_outputs is None:
            return None
        start = self._compiled(params.structured_outputs)
        width = -(-self._ll_tokenizer.vocab_size // 32)
        ends = self._eos_token_ids, params.stop_token_ids
        return GrammarMatcher(start.deep_copy(), width, self._vocabulary, params.min_tokens, *ends)

    def _compile(self, form: StructuredOutputsParams) -> Any:
        """An `LLMatcher` at the start of a grammar, to be copied."""
        if self._ll_tokenizer is None:
            self._ll_tokenizer = self._make_tokenizer()
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._ll_tokenizer, _grammar_of(form, LLMatcher), log_level=0)
        except (TypeError, ValueError) as error:  # such as of text that is not Unicode
            raise _refusal(form, str(error)) from error
        first = matcher.deep_copy()  # a grammar without an end, or that wants too much, fails at its first mask
        first.compute_bitmask()
        for tried in (matcher, first):
            if tried.is_error():
                raise _refusal(form, tried.get_error())
        return matcher

    def _make_tokenizer(self) -> Any:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise RequestError(
                "structured_outputs needs the llguidance package: pip install 'tritonllm-engine[structured]'."
            ) from error
        if self._tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer; set the tokenizer key")
        size = len(self._tokenizer)
        eos_token_ids = sorted(token for token in self._eos_token_ids if token < min(size, self._vocab_size))
        if not eos_token_ids:
            raise RequestError(
                f"structured_outputs needs an end-of-text id of the tokenizer, and {sorted(self._eos_token_ids)} has "
                "none; set the eos key"
            )
        try:
            return from_tokenizer(self._tokenizer, max(self._vocab_size, size), eos_token_ids)
        except Exception as error:  # llguidance's own, or those of a tokenizer that only resembles a fast one
            raise RequestError(
                f"structured_outputs cannot be used with the tokenizer {type(self._tokenizer).__name__}: {error}"
            ) from error


def _refusal(form: StructuredOutputsParams, reason: str) -> RequestError:
    (name,) = (name for name in ("json", "regex", "choice", "grammar") if getattr(form, name) is not None)
    value = repr(getattr(form, name))
    value = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
    reason = reason.partition("\n<state>")[0].strip()  # behind it llguidance tells its own state
    return RequestError(f"{name}={value} cannot be followed: {_MEANINGS.get(reason, reason)}")


def _grammar_of(form: StructuredOutputsParams, llmatcher: Any) -> str:
    """What `LLMatcher` takes."""
    if form.json is not None:
        return llmatcher.grammar_from_json_schema(form.json)
    if form.regex is not None:
        return llmatcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        return llmatcher.grammar_from_lark(f"start: {' | '.join(json.dumps(text) for text in form.choice)}")
    return llmatcher.grammar_from_lark(form.grammar)


def _mask_within(token_ids: Collection[int], vocabulary: np.ndarray) -> np.ndarray:
    """int32 words of these tokens, as far as they are among those of the model."""
    return mask_words([token for token in token_ids if token < 32 * len(vocabulary)], len(vocabulary)) & vocabulary


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
