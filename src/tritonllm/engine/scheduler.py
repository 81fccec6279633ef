"""Who runs in the next step. Plain Python: it hands out plans of integers and never sees a tensor.

The host runs one step behind the device: a step is scheduled before the tokens of the step before it are read. So a
sequence may have one unread token here, and a sequence that a step in flight writes to is neither preempted nor freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as TokenIds

from tritonllm.engine.block_manager import BlockManager
from tritonllm.engine.in_flight import InFlight
from tritonllm.engine.logprobs import StepLogprobs
from tritonllm.engine.plan import PrefillChunk, StepPlan, masks_of, prefill_chunk
from tritonllm.engine.prefill_budget import prefill_budget
from tritonllm.engine.request_limits import set_limits
from tritonllm.engine.rows import RowPlacement
from tritonllm.engine.scheduler_messages import check_prompt_length, describe_state
from tritonllm.engine.sequence import Choice, Sequence, SequenceStatus
from tritonllm.engine.steady_batch import SteadyBatch
from tritonllm.errors import EngineError


class Scheduler:
    """Continuous batching with chunked prefill, a prefix cache, and preemption by recomputation.

    Every step decodes all running sequences and spends the rest of its budget, or less (`prefill_budget`), on prompts.
    So whatever arrives delays a running sequence by a few chunks a step at most. Cached tokens cost no budget.

    Args:
        max_num_sequences: sequences that hold blocks at a time.
        max_num_batched_tokens: tokens a step computes at most.
        max_cached_blocks: blocks in the pool.
        block_size: tokens a block holds.
        eos: token id, or ids, that end a sequence.
        max_model_length: tokens of a prompt and its completion at most; None for no such limit.
        max_prefill_tokens_beside_decode: of each prompt on average, while sequences decode; None for no such limit.
    """

    def __init__(
        self,
        max_num_sequences: int,
        max_num_batched_tokens: int,
        max_cached_blocks: int,
        block_size: int,
        eos: int | TokenIds[int] | None,
        max_model_length: int | None = None,
        max_prefill_tokens_beside_decode: int | None = None,
    ) -> None:
        self.max_num_rows = max_num_sequences
        # A running sequence takes one token of every step, so more than the budget could never run together.
        self.max_num_sequences = min(max_num_sequences, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_prefill_tokens_beside_decode = max_prefill_tokens_beside_decode
        self.block_size = block_size
        self.eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
        self.max_model_length = max_model_length
        self.block_manager = BlockManager(max_cached_blocks, block_size)
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._rows = RowPlacement()
        self._in_flight: deque[InFlight] = deque()
        self._steady: SteadyBatch | None = None
        self._finished: list[Sequence] = []
        self._admissions = 0

    def check(self, num_prompt_tokens: int, max_model_length: int | None = None) -> None:
        """Raise RequestError if a prompt of this length can never be served; nothing is queued.

        Args:
            num_prompt_tokens: length of the prompt.
            max_model_length: the request's own limit on prompt and completion.
        """
        limits = {"max_model_length": self.max_model_length, "the request's own limit": max_model_length}
        check_prompt_length(num_prompt_tokens, limits, self.block_manager)

    def add_sequence(self, seq: Sequence, other_samples: TokenIds[Sequence] = ()) -> None:
        """Queue a request.

        Args:
            seq: its sequence.
            other_samples: more sequences of the same prompt and parameters. They enter the queue, at its head, when the
                first token of `seq` is read: then the full blocks of the prompt are there to be shared.

        Raises:
            RequestError: it can never be served; the queue is as before.
        """
        self.check(seq.num_prompt_tokens, seq.sampling_params.max_model_length)
        # The last token of a completion is never stored, so a full pool yields one token more than it holds.
        pool = self.block_manager.num_blocks * self.block_size + 1
        for sample in (seq, *other_samples):
            set_limits(sample, self.eos_token_ids, (pool, self.max_model_length))
            sample.status = SequenceStatus.WAITING
        for sample in other_samples:
            seq.held_samples.append(sample)
            sample.held_in = seq.held_samples
        self._steady = None
        self.waiting.append(seq)

    def is_finished(self) -> bool:
        """True once no request is left, every launched step has been read, and every finished request handed over."""
        return not (self.has_requests or self._in_flight or self._finished)

    @property
    def has_requests(self) -> bool:
        """Whether a request is queued or running."""
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def num_steps_in_flight(self) -> int:
        """Steps scheduled and not read yet."""
        return len(self._in_flight)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to launch before the steps in flight are read.

        Raises:
            EngineError: requests are waiting and nothing can ever run: a fault of this class.
        """
        if self._steady is not None:
            steady_plan = self._steady.next_step(self.block_manager)
            if steady_plan is not None:
                self._in_flight.append(self._steady.in_flight)
                return steady_plan
            self._steady = None
        decoding, new_blocks, stalled = self._schedule_decode()
        limits = len(self.prefilling) + self._num_admissible(stalled), self.max_prefill_tokens_beside_decode
        budget = prefill_budget(self.max_num_batched_tokens, len(decoding), *limits)
        prefilled = self._schedule_prefill(budget, stalled)
        if not decoding and not prefilled:
            if not self._in_flight and self.has_requests:
                raise EngineError(
                    f"nothing can run although requests are left, a fault of the scheduler: {describe_state(self)}"
                )
            return None
        rows = self._rows.place(decoding, new_blocks)
        plan = StepPlan(
            num_decode_rows=len(rows.sequences),
            row_updates=rows.updates,
            cleared_rows=rows.cleared,
            new_blocks=rows.grown,
            choice=max((seq.sampling.choice for seq in decoding), default=Choice.PLAIN),
            chunks=[chunk for _, chunk in prefilled],
            zero_blocks=self.block_manager.take_blocks_to_zero(),
            waits_for_masks=any(seq.matcher is not None for seq in decoding),
        )
        for seq in decoding:
            seq.token_source = seq.row
            seq.num_computed_tokens += 1
            seq.num_unread_tokens += 1
            seq.num_steps_in_flight += 1
        num_sampled = 0
        for seq, chunk in prefilled:
            seq.num_computed_tokens = chunk.context_len
            seq.num_steps_in_flight += 1
            if chunk.sample:
                seq.token_source = self.max_num_rows + num_sampled
                num_sampled += 1
                seq.num_unread_tokens += 1
                seq.status = SequenceStatus.RUNNING
                self.prefilling.remove(seq)
                self.running.append(seq)
        self._in_flight.append(InFlight(rows.sequences, prefilled))
        if not (prefilled or self.prefilling or stalled):
            self._steady = SteadyBatch(rows.sequences, plan.choice, self.block_size)
        return plan

    def postprocess(self, token_ids: list[int], logprobs: StepLogprobs | None = None) -> list[Sequence]:
        """Take in the tokens of the oldest step in flight.

        Args:
            token_ids: one for each decode row, then one for each chunk that samples; -1 where the model's output was
                NaN.
            logprobs: what the step reports.

        Returns:
            The requests found finished, each once in its life, aborted ones among them.
        """
        step = self._in_flight.popleft()
        if logprobs is not None:
            step.record_logprobs(token_ids, logprobs)
        tokens = iter(token_ids)
        block_size = self.block_size
        for seq, token in zip(step.decoded, tokens, strict=False):
            length = len(seq.token_ids)
            at_edge = length % block_size == 0 or length + 1 >= seq.max_length
            if at_edge or token < 0 or token in seq.end_token_ids or seq.status is SequenceStatus.FINISHED:
                self._read(seq, length, token)
            else:  # as there, for all but a few tokens
                seq.num_steps_in_flight -= 1
                seq.num_unread_tokens -= 1
                seq.token_ids.append(token)
        for seq, chunk in step.prefilled:
            self._read(seq, chunk.context_len, next(tokens) if chunk.sample else None)
        for seq, error in step.follow_grammars():
            self._finish(seq, "error", error)
        return self.take_finished()

    def late_masks(self) -> list[tuple[int, bytes]]:
        """What the newest step waits for if its plan waits for masks; the steps before it have been read."""
        return masks_of(self._in_flight[-1].decoded)

    def take_finished(self) -> list[Sequence]:
        """Requests that finished and were not reported yet."""
        finished, self._finished = self._finished, []
        return finished

    def keep_finished(self, seqs: list[Sequence]) -> None:
        """Give back finished requests that the caller is not the one to report; `take_finished` returns them again."""
        self._finished = seqs + self._finished

    def abort(self, seq: Sequence) -> bool:
        """End a request wherever it is; its blocks come back once no step in flight writes to them.

        Returns:
            False if it had finished already.
        """
        if seq.is_finished:
            return False
        self._finish(seq, "abort")
        return True

    def stop(self, seq: Sequence, stop_string: str) -> None:
        """End a request whose last token, which may have ended it already, completed a stop string."""
        self.abort(seq)
        seq.finish_reason, seq.stop_reason = "stop", stop_string

    def _read(self, seq: Sequence, num_stored: int, token: int | None) -> None:
        """One sequence's part of a step that has been read: `num_stored` keys are there, `token` was sampled."""
        seq.num_steps_in_flight -= 1
        if token is not None:
            seq.num_unread_tokens -= 1
        if seq.is_finished:  # the surplus of a step launched before the end was known
            self._release(seq)
            return
        if token is not None and token < 0:
            self.block_manager.poison(seq)
            self._finish(seq, "error", "the model's output for this request was not a number (NaN)")
            return
        if num_stored // self.block_size > seq.num_registered_blocks:
            self.block_manager.register(seq, num_stored)
        if token is None:
            return
        seq.append_token(token)
        if seq.held_samples:
            self._release_samples(seq)
        if seq.matcher is not None and seq.matcher.error:  # its mask let nothing but an end through
            self._finish(seq, "error", seq.matcher.error)
        elif token in seq.end_token_ids:
            seq.stop_reason = token
            self._finish(seq, "stop")
        elif len(seq) >= seq.max_length:
            self._finish(seq, "length")

    def _finish(self, seq: Sequence, reason: str, error: str | None = None) -> None:
        queue = getattr(self, seq.status.value)  # a status says which
        (queue if seq.held_in is None else seq.held_in).remove(seq)
        self._release_samples(seq)
        self._steady = None
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.error = reason, error
        self._finished.append(seq)
        self._release(seq)

    def _release_samples(self, seq: Sequence) -> None:
        """Let the other samples of a prompt in, before whoever came later."""
        for sample in reversed(seq.held_samples):
            sample.held_in = None
            self.waiting.appendleft(sample)
            self._steady = None
        seq.held_samples.clear()

    def _release(self, seq: Sequence) -> None:
        if seq.num_steps_in_flight == 0:
            self.block_manager.deallocate(seq)
            self._steady = None  # somebody may be waiting for these blocks, or they may have to be zeroed

    def _schedule_decode(self) -> tuple[list[Sequence], dict[int, list[int]], set[int]]:
        """Running sequences that get a token, the blocks each was given for it, and the sequences left out."""
        decoding: list[Sequence] = []
        new_blocks: dict[int, list[int]] = {}
        stalled: set[int] = set()
        for seq in list(self.running):
            length = seq.length
            if seq.seq_id in stalled or seq.status is not SequenceStatus.RUNNING or length >= seq.max_length:
                continue
            if length <= len(seq.block_table) * self.block_size:  # all but one step of a block's worth
                decoding.append(seq)
            elif self._make_room(seq, stalled):
                new_blocks[seq.seq_id] = self.block_manager.append(seq)
                decoding.append(seq)
        return decoding, new_blocks, stalled

    def _make_room(self, seq: Sequence, stalled: set[int]) -> bool:
        """Preempt the newest sequences until `seq` can grow; False if it has to wait for a step to be read.

        A victim that a step in flight writes to is left out of this step instead, and can be preempted in the next.
        """
        while not self.block_manager.can_append(seq):
            victim = max(self.running + self.prefilling, key=lambda other: other.admission)
            if stalled or victim.num_steps_in_flight:
                stalled.update((victim.seq_id, seq.seq_id))
                return False
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to the head of the queue; its tokens, sampled ones too, will be computed again as a prompt."""
        (self.running if seq.status is SequenceStatus.RUNNING else self.prefilling).remove(seq)
        self.block_manager.deallocate(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _schedule_prefill(self, budget: int, stalled: set[int]) -> list[tuple[Sequence, PrefillChunk]]:
        """Prompt chunks within the budget: prompts under way first, then new ones in the order of their arrival."""
        prefilled: list[tuple[Sequence, PrefillChunk]] = []
        for seq in self.prefilling:
            if budget == 0:
                break
            if seq.seq_id not in stalled:
                budget -= self._take_chunk(seq, budget, prefilled)
        while budget > 0 and self._num_admissible(stalled):
            seq = self.waiting.popleft()
            self.block_manager.allocate(seq)
            seq.status = SequenceStatus.PREFILLING
            seq.admission = self._admissions
            self._admissions += 1
            self.prefilling.append(seq)
            budget -= self._take_chunk(seq, budget, prefilled)
        return prefilled

    def _num_admissible(self, stalled: set[int]) -> int:
        """Waiting sequences for which there are places; none while the first, or a running one, waits for blocks."""
        held = len(self.running) + len(self.prefilling)
        places = min(len(self.waiting), self.max_num_sequences - held)
        # One block in hand for each sequence that holds some, or the newcomer would soon be preempted again.
        fits = places > 0 and not stalled and self.block_manager.can_allocate(self.waiting[0], reserve=held)
        return places if fits else 0

    @staticmethod
    def _take_chunk(seq: Sequence, budget: int, prefilled: list[tuple[Sequence, PrefillChunk]]) -> int:
        chunk = prefill_chunk(seq, min(len(seq) - seq.num_computed_tokens, budget))
        prefilled.append((seq, chunk))
        return len(chunk.token_ids)
