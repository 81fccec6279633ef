"""A request with its text: where the two meet, and where a stop string ends it."""

from __future__ import annotations

from typing import Any

from tritonllm.engine.detokenizer import Detokenizer, decode
from tritonllm.engine.logprobs import TokenLogprobs
from tritonllm.engine.outputs import RequestOutput, StreamOutput
from tritonllm.engine.sequence import Sequence
from tritonllm.engine.stop_strings import StopStrings


class Completion:
    """What a sequence says so far. The text is made when it is asked for, with stop strings at every token.

    Args:
        seq: the sequence, before its first token is read.
        tokenizer: the checkpoint's; None makes every text empty.
        index: which prompt of a call it completes.
        sample: which completion of that prompt it is.
        request_id: the seq_id of the prompt's first sample.

    Attributes:
        all_sent: `next_piece` has given the last piece.
    """

    def __init__(self, seq: Sequence, tokenizer: Any, index: int, sample: int, request_id: int) -> None:
        params = seq.sampling_params
        self.seq = seq
        self.index = index
        self.sample = sample
        self.request_id = request_id
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._num_read = 0
        self._num_sent = 0
        self._pieces: list[str] = []
        self._num_pieces_sent = 0
        self.all_sent = False
        self._text_is_whole = False

    @property
    def has_stop_strings(self) -> bool:
        return self._stops is not None

    def read(self) -> str | None:
        """Bring the text up to date; returns the stop string that ends it, once it is there."""
        if not self._text_is_whole:
            last = self.seq.is_finished
            token_ids = self._text_token_ids(self._num_read)
            self._num_read += len(token_ids)
            piece = self._detokenizer.add(token_ids, last)
            if self._stops is not None:
                may_stop = self.seq.num_completion_tokens > self.seq.sampling_params.min_tokens
                piece = self._stops.add(piece, last, may_stop)
            if piece:
                self._pieces.append(piece)
            self._text_is_whole = last or self._stop_string is not None
        return self._stop_string

    def next_piece(self) -> StreamOutput | None:
        """What came since the last call; None if nothing did."""
        seq = self.seq
        token_ids = seq.token_ids[seq.num_prompt_tokens + self._num_sent :]
        if self.all_sent or not (token_ids or seq.is_finished):
            return None
        self.read()
        text = "".join(self._pieces[self._num_pieces_sent :])
        is_first = self._num_sent == 0
        new = slice(self._num_sent, self._num_sent + len(token_ids))
        self._num_sent = new.stop
        self.all_sent = seq.is_finished
        self._num_pieces_sent = len(self._pieces)
        return StreamOutput(
            self.index,
            text,
            token_ids,
            seq.finish_reason,
            seq.error,
            seq.stop_reason,
            self.sample,
            None if self._logprobs is None else self._logprobs[new],
            self._prompt_logprobs if is_first else None,
        )

    def text(self) -> str:
        """All text of a finished request."""
        if self._num_read == 0 and self._stops is None:
            return decode(self._tokenizer, self._text_token_ids(0), self.seq.sampling_params.skip_special_tokens)
        self.read()
        return "".join(self._pieces)

    def output(self) -> RequestOutput:
        """The finished request as the caller gets it."""
        seq = self.seq
        return RequestOutput(
            self.request_id,
            seq.completion_token_ids,
            seq.finish_reason or "error",
            seq.error,
            seq.num_prompt_tokens,
            seq.num_cached_tokens,
            seq.stop_reason,
            self.sample,
            self._logprobs,
            self._prompt_logprobs,
            self.text,
        )

    @property
    def _logprobs(self) -> list[TokenLogprobs] | None:
        return None if self.seq.sampling_params.logprobs is None else self.seq.logprobs

    @property
    def _prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        return None if self.seq.sampling_params.prompt_logprobs is None else [None, *self.seq.prompt_logprobs]

    @property
    def _stop_string(self) -> str | None:
        return None if self._stops is None else self._stops.found

    def _text_token_ids(self, start: int) -> list[int]:
        """Tokens from `start` on that make text: not the id that stopped it, unless that is asked for."""
        seq = self.seq
        stop = len(seq.token_ids)
        if isinstance(seq.stop_reason, int) and not seq.sampling_params.include_stop_str_in_output:
            stop -= 1
        return seq.token_ids[seq.num_prompt_tokens + start : stop]
