"""A device made of Python lists: it executes step plans and checks them, and its tokens depend on all it was given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tritonllm.engine.plan import StepPlan
from tritonllm.engine.scheduler import Scheduler
from tritonllm.engine.sequence import Sequence, SequenceStatus

NAN = -1
"""What a slot holds once NaN was written to it."""


def next_token(tokens: list[int], vocab: int = 97, seed: int = 0) -> int:
    """The token that the pretend model gives after `tokens`: any wrong or missing one changes it."""
    state = 7 + seed
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % vocab


def expected_completion(prompt: list[int], num_tokens: int, eos: int | None = None) -> list[int]:
    """What the pretend model completes, without blocks, rows or batches."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """Stores tokens in slots where a model would store keys and values, and reads them back through block tables."""

    def __init__(self, num_rows: int, num_blocks: int, block_size: int) -> None:
        self.num_rows = num_rows
        self.block_size = block_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.rows: list[dict | None] = [None] * num_rows
        self.sampled = [-7] * (2 * num_rows)
        self.unread: list[list[int]] = []
        self.max_tokens_in_a_step = 0

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, table: list[int], position: int, token: int, written: set[int]) -> None:
        slot = self._slot(table, position)
        assert slot not in written, "two tokens of one step share a slot"
        assert self.slots[slot] != NAN, "a block was handed out again that may hold NaN"
        written.add(slot)
        self.slots[slot] = token

    def _next(self, table: list[int], length: int, seed: int) -> int:
        tokens = [self.slots[self._slot(table, position)] for position in range(length)]
        assert None not in tokens, "an unwritten slot was read"
        assert NAN not in tokens, "a slot was read that may hold NaN"
        return next_token(tokens, seed=seed)  # type: ignore[arg-type]

    def poison(self, block_ids: list[int]) -> None:
        """NaN was written to these blocks."""
        for block_id in block_ids:
            self.slots[block_id * self.block_size : (block_id + 1) * self.block_size] = [NAN] * self.block_size

    def launch(self, plan: StepPlan) -> None:
        for block_id in plan.zero_blocks:
            self.slots[block_id * self.block_size : (block_id + 1) * self.block_size] = [None] * self.block_size
        for row in plan.cleared_rows:
            self.rows[row] = None
        before = list(self.sampled)
        for update in plan.row_updates:
            token = update.token if update.token_source < 0 else before[update.token_source]
            assert token >= 0
            self.rows[update.row] = {
                "token": token,
                "length": update.context_len,
                "table": list(update.block_table),
                "seed": update.sampling.seed,
            }
        for row, index, block_id in plan.new_blocks:
            table = self.rows[row]["table"]
            assert index == len(table)
            table.append(block_id)
        written: set[int] = set()
        for index, row in enumerate(self.rows):
            assert (row is not None) == (index < plan.num_decode_rows)
            if row is None:
                continue
            self._write(row["table"], row["length"] - 1, row["token"], written)
            row["token"] = self.sampled[index] = self._next(row["table"], row["length"], row["seed"])
            row["length"] += 1
        num_sampled = 0
        for chunk in plan.chunks:
            assert chunk.token_ids
            for offset, token in enumerate(chunk.token_ids):
                self._write(chunk.block_table, chunk.start + offset, token, written)
            if chunk.sample:
                token = self._next(chunk.block_table, chunk.context_len, chunk.sampling.seed)
                self.sampled[self.num_rows + num_sampled] = token
                num_sampled += 1
        assert len(written) == plan.num_tokens
        self.max_tokens_in_a_step = max(self.max_tokens_in_a_step, plan.num_tokens)
        self.unread.append(
            self.sampled[: plan.num_decode_rows] + self.sampled[self.num_rows : self.num_rows + num_sampled]
        )

    def collect(self) -> list[int]:
        return self.unread.pop(0)


class FakeEngine:
    """The engine's step loop over a scheduler and a fake runner, with the scheduler's invariants checked each step."""

    def __init__(
        self,
        *,
        rows: int = 4,
        budget: int = 16,
        blocks: int = 8,
        block_size: int = 4,
        eos: int | None = None,
        max_model_length: int | None = None,
        limit: int | None = None,
    ) -> None:
        self.scheduler = Scheduler(rows, budget, blocks, block_size, eos, max_model_length, limit)
        self.runner = FakeRunner(rows, blocks, block_size)
        self.sequences: dict[int, Sequence] = {}
        self.finished: dict[int, Sequence] = {}
        self.before_reading: Callable[[list[int]], None] = lambda tokens: None
        self._live: dict[int, Sequence] = {}
        self._prompts: dict[int, list[int]] = {}
        self._right: dict[int, int] = {}  # tokens of each that were compared with the model's
        self._has_samples = False
        self._idle: Counter[int] = Counter()  # steps in a row that a running sequence got no token

    def add(self, seq: Sequence, other_samples: list[Sequence] | None = None) -> Sequence:
        self.scheduler.add_sequence(seq, other_samples or [])
        self._has_samples |= bool(other_samples)
        for sample in [seq, *(other_samples or [])]:
            self.sequences[sample.seq_id] = self._live[sample.seq_id] = sample
            self._prompts[sample.seq_id] = list(sample.token_ids)
            self._right[sample.seq_id] = len(sample)
        return seq

    def step(self) -> StepPlan | None:
        before = {seq.seq_id: seq.length for seq in self.scheduler.running if seq.length < seq.max_length}
        prompts, preemptions = [*self.scheduler.waiting, *self.scheduler.prefilling], self.scheduler.num_preemptions
        plan = self.scheduler.schedule()
        limit = self.scheduler.max_prefill_tokens_beside_decode
        if limit is not None and plan is not None and plan.num_decode_rows:
            num_prompts = len(prompts) + self.scheduler.num_preemptions - preemptions
            num_tokens = plan.num_tokens - plan.num_decode_rows
            assert num_tokens <= limit * num_prompts, "a decoding sequence waits for more prompt tokens than it should"
        # Samples of one prompt need new blocks all at once, and those that are older take what others gave back.
        older_came_first = self._has_samples and plan is not None and bool(plan.new_blocks)
        for seq in self.scheduler.running:
            waits = before.get(seq.seq_id) == seq.length and not older_came_first
            self._idle[seq.seq_id] = self._idle[seq.seq_id] + 1 if waits else 0
            assert self._idle[seq.seq_id] <= 2, "a running sequence waits although no step in flight is in its way"
        if plan is not None:
            self.runner.launch(plan)
        done = self.scheduler.take_finished()
        if self.scheduler.num_steps_in_flight > (1 if plan is not None else 0):
            tokens = self.runner.collect()
            self.before_reading(tokens)
            done += self.scheduler.postprocess(tokens)
        for seq in done:
            assert seq.seq_id not in self.finished, "a request was reported twice"
            self.finished[seq.seq_id] = seq
        self.check()
        return plan

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if self.scheduler.is_finished():
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps")

    def check(self) -> None:
        """Every invariant of the scheduler, its queues, tables and tokens."""
        scheduler, live = self.scheduler, self._live.values()
        queues = (scheduler.waiting, scheduler.prefilling, scheduler.running)
        times = Counter(seq.seq_id for queue in queues for seq in queue)
        times.update(seq.seq_id for seq in scheduler._finished)
        times.update(held.seq_id for queue in queues for seq in queue for held in seq.held_samples)
        in_flight = Counter(
            seq.seq_id
            for step in scheduler._in_flight
            for seq in [*step.decoded, *(prefilled for prefilled, _ in step.prefilled)]
        )
        scheduler.block_manager.check_invariants(live)
        assert len(scheduler.running) + len(scheduler.prefilling) <= scheduler.max_num_sequences
        assert self.runner.max_tokens_in_a_step <= scheduler.max_num_batched_tokens
        assert in_flight.keys() <= self._live.keys()
        for seq in list(live):
            assert times[seq.seq_id] + (seq.seq_id in self.finished) == 1, "a sequence is in no queue, or in two"
            assert seq.num_steps_in_flight == in_flight[seq.seq_id]
            self._check_table(seq)
            self._check_tokens(seq)
            if seq.seq_id in self.finished and not seq.num_steps_in_flight:
                del self._live[seq.seq_id]

    def _check_table(self, seq: Sequence) -> None:
        """A table holds what is computed and what the step in flight adds, and no more."""
        blocks_for = self.scheduler.block_manager.blocks_for
        held = len(seq.block_table)
        if seq.status is SequenceStatus.PREFILLING:
            assert held == blocks_for(len(seq))
        elif seq.status is SequenceStatus.RUNNING:
            assert held == blocks_for(seq.num_computed_tokens)
            assert seq.num_computed_tokens == seq.length - 1
        elif seq.num_steps_in_flight:
            assert seq.is_finished, "a sequence that a step in flight writes to was preempted"
            assert held, "blocks were freed that a step in flight writes to"
        else:
            assert held == seq.num_computed_tokens == seq.num_registered_blocks == 0

    def _check_tokens(self, seq: Sequence) -> None:
        """The prompt is what it was, and every token is the model's own."""
        prompt = self._prompts[seq.seq_id]
        assert seq.token_ids[: len(prompt)] == prompt
        ends = self.scheduler.eos_token_ids if not seq.sampling_params.ignore_eos else frozenset()
        for length in range(self._right[seq.seq_id], len(seq)):
            assert seq.token_ids[length] == next_token(seq.token_ids[:length], seed=seq.sampling.seed)
            assert length == len(prompt) or seq.token_ids[length - 1] not in ends, "a token after the end of the text"
        assert len(seq) <= seq.max_length
        self._right[seq.seq_id] = len(seq)
