"""The tokens of one request and how far the engine has come with them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as TokenIds
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple

from tritonllm.engine.bad_words import ring_of
from tritonllm.engine.controls import RowControls, Seen, controls_of
from tritonllm.engine.logprobs import TokenLogprobs
from tritonllm.errors import RequestError
from tritonllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tritonllm.engine.grammars import GrammarMatcher

_next_seq_id = itertools.count().__next__


class SequenceStatus(Enum):
    """The queue that a sequence is in."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


class Choice(IntEnum):
    """What choosing a token takes; a step takes what its most demanding row does."""

    PLAIN = 0
    """Greedy or plain temperature: a token can be chosen without looking at a whole row of logits at once."""
    FILTERED = 1
    """Top-k or top-p."""
    CONTROLLED = 2
    """Whatever else there is."""
    REPORTED = 3
    """As CONTROLLED, and log probabilities are read."""

    @property
    def end(self) -> Choice:
        """The end of a forward pass that does this: PLAIN, FILTERED or CONTROLLED."""
        return min(self, Choice.CONTROLLED)


class RowSampling(NamedTuple):
    """How the next token of a sequence is chosen, as plain numbers."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    controls: RowControls | None = None

    @property
    def choice(self) -> Choice:
        """What choosing the token takes."""
        if self.controls is not None:
            return Choice.CONTROLLED if self.controls.num_logprobs < 0 else Choice.REPORTED
        is_plain = self.temperature == 0 or (self.top_k == 0 and self.top_p == 1)
        return Choice.PLAIN if is_plain else Choice.FILTERED


class Sequence:
    """One request: its prompt, the tokens read so far, its blocks, and the steps still in flight for it.

    The prompt never changes, and tokens are only ever appended, by the scheduler as it reads them.

    Attributes:
        seq_id: unique in the process.
        token_ids: prompt and completion, as far as read from the device.
        num_prompt_tokens: length of the prompt.
        bad_words: tokens of the request's bad words.
        max_length: prompt and completion end here; set when the scheduler admits the request.
        end_token_ids: ids that end the text; set then, too.
        sampling: how its tokens are chosen; whole once the scheduler has admitted the request.
        finish_reason: "stop", "length", "abort" or "error" once it is finished.
        stop_reason: what stopped it if the reason is "stop": the token id, or the stop string.
        logprobs: what was reported of each token of the completion, if the request asked for that.
        prompt_logprobs: the same of each token of the prompt but the first.
        matcher: where the completion stands in the request's grammar, None if it has none.
        block_table: cache blocks, in order; block i holds tokens `i * block_size` to `(i + 1) * block_size - 1`.
        num_cached_tokens: tokens found in the prefix cache when the sequence was first admitted.
        num_computed_tokens: tokens whose keys and values are stored, or will be by a step already launched.
        num_unread_tokens: tokens sampled by launched steps and not read yet.
        num_steps_in_flight: launched, unread steps that write to this sequence's blocks.
        row: row of the decode state on the device, -1 if none.
        token_source: where the device holds the unread token.
        held_samples: other samples of the same prompt, which wait for this one to compute it.
        held_in: that list, in a sample that is in it.
    """

    def __init__(
        self,
        token_ids: TokenIds[int],
        sampling_params: SamplingParams | None = None,
        *,
        block_size: int = 256,
        seed: int = 0,
        bad_words: tuple[tuple[int, ...], ...] = (),
        matcher: GrammarMatcher | None = None,
    ) -> None:
        self.seq_id = _next_seq_id()
        self.sampling_params = sampling_params if sampling_params is not None else SamplingParams()
        self.block_size = block_size
        self.bad_words = bad_words
        params = self.sampling_params
        if params.structured_outputs is not None and matcher is None:
            raise RequestError(
                "a sequence with structured_outputs needs a matcher of its grammar; see Grammars.matcher"
            )
        self.matcher = matcher
        self.sampling = RowSampling(
            params.temperature,
            params.top_k,
            params.top_p,
            seed if params.seed is None else params.seed,
            controls_of(params, len(token_ids), (), bad_words),
        )
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_length = self.num_prompt_tokens + (params.max_tokens or 0)
        self.end_token_ids: frozenset[int] = frozenset()
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.block_table: list[int] = []
        self.num_registered_blocks = 0
        self.prefix_uid = 0
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.num_unread_tokens = 0
        self.num_steps_in_flight = 0
        self.admission = -1
        self.row = -1
        self.token_source = -1
        self.held_samples: list[Sequence] = []
        self.held_in: list[Sequence] | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def length(self) -> int:
        """Tokens read and tokens on their way."""
        return len(self.token_ids) + self.num_unread_tokens

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def num_blocks(self) -> int:
        """Blocks that the tokens read so far fill, the last one perhaps in part."""
        return -(-len(self.token_ids) // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        """Tokens in the last block: 0 if there is none, `block_size` if it is full."""
        return len(self.token_ids) - max(self.num_blocks - 1, 0) * self.block_size

    def block(self, index: int) -> list[int]:
        """Token ids of one block."""
        return self.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def seen(self, stop: int) -> Seen | None:
        """Prompt and output up to `stop`, if penalties have to know them."""
        controls = self.sampling.controls
        if controls is None or not controls.has_penalties:
            return None
        return self.token_ids[: self.num_prompt_tokens], self.token_ids[self.num_prompt_tokens : stop]

    def recent(self, stop: int) -> tuple[int, ...] | None:
        """The newest tokens of the output up to `stop` as a ring, if bad words have to know them."""
        return ring_of(self.token_ids, self.num_prompt_tokens, stop) if self.bad_words else None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log probabilities of the prompt are to be reported still; until then every token is computed."""
        wanted = self.sampling_params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def next_prompt_tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens of the prompt behind positions `start` to `stop - 1`, if their log probabilities are wanted."""
        if not self.wants_prompt_logprobs:
            return ()
        return tuple(self.token_ids[start + 1 : min(stop + 1, self.num_prompt_tokens)])

    def append_token(self, token_id: int) -> None:
        """Add a sampled token."""
        self.token_ids.append(token_id)
