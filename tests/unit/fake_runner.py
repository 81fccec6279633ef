"""A device made of Python lists: it executes step plans and checks them, and its tokens depend on all it was given."""

from __future__ import annotations

from tritonllm.engine.plan import StepPlan
from tritonllm.engine.scheduler import Scheduler
from tritonllm.engine.sequence import Sequence


def next_token(tokens: list[int], vocab: int = 97) -> int:
    """The token that the pretend model gives after `tokens`: any wrong or missing one changes it."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % vocab


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

    def _read(self, table: list[int], length: int) -> list[int]:
        tokens = [self.slots[self._slot(table, position)] for position in range(length)]
        assert None not in tokens, "an unwritten slot was read"
        return tokens  # type: ignore[return-value]

    def launch(self, plan: StepPlan) -> None:
        for row in plan.cleared_rows:
            self.rows[row] = None
        before = list(self.sampled)
        for update in plan.row_updates:
            token = update.token if update.token_source < 0 else before[update.token_source]
            assert token >= 0
            self.rows[update.row] = {"token": token, "length": update.context_len, "table": list(update.block_table)}
        for row, index, block_id in plan.new_blocks:
            table = self.rows[row]["table"]
            assert index == len(table)
            table.append(block_id)
        written: list[int] = []
        for index, row in enumerate(self.rows):
            assert (row is not None) == (index < plan.num_decode_rows)
            if row is None:
                continue
            slot = self._slot(row["table"], row["length"] - 1)
            self.slots[slot] = row["token"]
            written.append(slot)
            row["token"] = self.sampled[index] = next_token(self._read(row["table"], row["length"]))
            row["length"] += 1
        num_sampled = 0
        for chunk in plan.chunks:
            assert chunk.token_ids
            for offset, token in enumerate(chunk.token_ids):
                slot = self._slot(chunk.block_table, chunk.start + offset)
                self.slots[slot] = token
                written.append(slot)
            if chunk.sample:
                tokens = self._read(chunk.block_table, chunk.context_len)
                self.sampled[self.num_rows + num_sampled] = next_token(tokens)
                num_sampled += 1
        assert len(set(written)) == len(written), "two tokens of one step share a slot"
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
    ) -> None:
        self.scheduler = Scheduler(rows, budget, blocks, block_size, eos, max_model_length)
        self.runner = FakeRunner(rows, blocks, block_size)
        self.sequences: dict[int, Sequence] = {}
        self.finished: dict[int, Sequence] = {}

    def add(self, seq: Sequence) -> Sequence:
        self.scheduler.add_sequence(seq)
        self.sequences[seq.seq_id] = seq
        return seq

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.runner.launch(plan)
        done = self.scheduler.take_finished()
        if self.scheduler.num_steps_in_flight > (1 if plan is not None else 0):
            done += self.scheduler.postprocess(self.runner.collect())
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
        scheduler = self.scheduler
        queues = [list(scheduler.waiting), scheduler.prefilling, scheduler.running, list(self.finished.values())]
        queues[3] += scheduler._finished
        for seq in self.sequences.values():
            assert sum(seq in queue for queue in queues) == 1, "a sequence is in no queue, or in two"
        scheduler.block_manager.check_invariants(list(self.sequences.values()))
        assert len(scheduler.running) + len(scheduler.prefilling) <= scheduler.max_num_sequences
        assert self.runner.max_tokens_in_a_step <= scheduler.max_num_batched_tokens
        for seq in self.sequences.values():
            needed = -(-seq.length // scheduler.block_size)
            assert len(seq.block_table) <= max(needed, scheduler.block_manager.blocks_for(len(seq) + 1))


def expected_completion(prompt: list[int], num_tokens: int, eos: int | None = None) -> list[int]:
    """What the pretend model completes, without blocks, rows or batches."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]
