"""Schedule, launch, read: the engine's steps, kept whole whatever other threads, Ctrl-C and failures do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tritonllm.engine.completion import Completion
from tritonllm.engine.guard import EngineGuard
from tritonllm.engine.model_runner import ModelRunner
from tritonllm.engine.scheduler import Scheduler
from tritonllm.engine.sequence import Sequence
from tritonllm.errors import EngineError


class StepLoop:
    """Drives a scheduler and a runner. Every method but `advance` takes its own turn; `advance` wants to be in one.

    Args:
        scheduler, runner: the two halves, both at rest.

    Attributes:
        guard: whose turn it is.
        requests: by id, those that `LLMEngine.step` reports; not those of a generate or stream call.
        watched: requests with stop strings, looked at after every step.
        closed: set when the runner has given back its memory.
        num_steps, num_processed_tokens: launched so far.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.guard = EngineGuard()
        self.requests: dict[int, Completion] = {}
        self.watched: list[Completion] = []
        self.closed = False
        self.num_steps = 0
        self.num_processed_tokens = 0
        self._abandoned: deque[Sequence] = deque()  # of calls that ended early, until they are aborted
        self._in_step = False
        self._failure: str | None = None

    def require_usable(self, closed_too: bool = False) -> None:
        """Raise EngineError after a failure and, unless `closed_too`, after the end."""
        if self.closed and not closed_too:
            raise EngineError("the engine was closed by exit(); make a new one")
        if self._failure is not None:
            raise EngineError(self._failure)

    def advance(self) -> tuple[list[Sequence], int, bool]:
        """Launch the next step, if there is work, and read the step before it.

        Returns:
            Those of `requests` found finished; tokens of the step launched; whether it held prompt tokens.
        """
        self.require_usable()
        self._in_step = True
        try:
            self._abort_abandoned()
            plan = self.scheduler.schedule()
            if plan is not None:
                self.runner.call("launch", plan)
                self.num_steps += 1
                self.num_processed_tokens += plan.num_tokens
            finished = self.scheduler.take_finished()
            # The host stays one step behind: with a step launched just now, read the one before it.
            if self.scheduler.num_steps_in_flight > (1 if plan is not None else 0):
                finished += self.scheduler.postprocess(self.runner.collect(), self.runner.logprobs)
            if plan is not None and plan.waits_for_masks:  # by now the device has begun with its forward pass
                self.runner.call("choose", self.scheduler.late_masks())
            if self.watched:
                finished += self._stop_at_strings()
        except BaseException as error:
            # The scheduler may count on a step that the device never saw, so no later token could be trusted.
            self._failure = (
                "the engine failed in the middle of a step and cannot go on; call exit() and make a new one "
                f"({type(error).__name__}: {error})"
            )
            if isinstance(error, Exception):
                raise EngineError(self._failure) from error
            raise
        finally:
            self._in_step = False
        return self._reported(finished), plan.num_tokens if plan else 0, bool(plan and plan.chunks)

    @contextmanager
    def queued(self, make: Callable[[], list[Completion]]) -> Iterator[list[Completion]]:
        """The requests that `make` queues for a call; whatever ends the call early aborts those that are left."""
        completions: list[Completion] = []
        try:
            with self.guard.turn():
                self.require_usable()
                completions += make()
            yield completions
        finally:
            self.abandon([completion.seq for completion in completions])

    def steps_until_finished(self, completions: list[Completion]) -> Iterator[tuple[int, bool]]:
        """Step until these are done, keeping what else finishes for `LLMEngine.step`.

        Yields:
            Tokens of the step launched, and whether it held prompt tokens.
        """
        while not all(completion.seq.is_finished for completion in completions):
            with self.guard.turn():
                finished, num_tokens, is_prefill = self.advance()
                self.scheduler.keep_finished(finished)
                if self.guard.interrupted:
                    raise KeyboardInterrupt
            yield num_tokens, is_prefill

    def abandon(self, sequences: list[Sequence]) -> None:
        """Abort what is left of these and, with nobody else there, read the surplus: an idle engine holds no blocks.

        The garbage collector may close a stream at any moment and in any thread; if that is in the middle of a step,
        the next step aborts them.
        """
        self._abandoned.extend(seq for seq in sequences if not seq.is_finished)
        with suppress(EngineError), self.guard.turn():
            if self._in_step or self.closed or self._failure is not None:
                return
            self._abort_abandoned()
            self.scheduler.keep_finished(self._reported(self.scheduler.take_finished()))
            while self.scheduler.num_steps_in_flight and not self.scheduler.has_requests:
                self.scheduler.keep_finished(self.advance()[0])

    def _stop_at_strings(self) -> list[Sequence]:
        """End the requests whose last token completed a stop string; returns those that went on until now."""
        for completion in self.watched:
            stop_string = completion.read()
            if stop_string is not None and completion.seq.finish_reason not in ("abort", "error"):
                self.scheduler.stop(completion.seq, stop_string)
        self.watched = [completion for completion in self.watched if not completion.seq.is_finished]
        return self.scheduler.take_finished()

    def _reported(self, finished: list[Sequence]) -> list[Sequence]:
        return [seq for seq in finished if seq.seq_id in self.requests]

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            self.scheduler.abort(self._abandoned.popleft())
