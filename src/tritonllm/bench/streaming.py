"""Gaps between the tokens of streams while long prompts arrive: `tritonllm bench streaming MODEL`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tritonllm.bench.limits import fraction
from tritonllm.bench.timing import Bench, rounded
from tritonllm.errors import EngineError
from tritonllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tritonllm.engine.completion import Completion

STREAM_PROMPT_TOKENS = 16
"""Short, so that a stream which takes the place of one that ended costs the others next to nothing."""


def measure(
    bench: Bench, streams: int, output_tokens: int, prompt_tokens: int, interval: float, seconds: float
) -> dict[str, Any]:
    """Decode streams for some time while a long prompt arrives every interval, the first one at once.

    A gap is the time between two tokens of a stream on the host's clock, taken when the step that read them returns.
    The tokens of a stream's own prompt make none. One long prompt before the clock starts is not counted, and those
    that arrived in time are waited for.

    Args:
        streams: how many decode at any time.
        output_tokens: of each; another one follows at once. The first ones end one by one, evenly spread.
        prompt_tokens: of a long prompt, which gets one token of output.
        interval: seconds between two of them.
        seconds: how long gaps are counted.

    Raises:
        EngineError: a request failed, or no stream had two tokens in that time.
    """
    running = _Streams(bench, streams, output_tokens)
    prompts = _Prompts(bench, bench.prompts(2 + math.ceil(seconds / interval), prompt_tokens))
    prompts.add()
    while prompts.waiting or not running.all_decode:
        _step(bench, running, prompts)
    running.gaps.clear()
    prompts.seconds.clear()
    before, start = bench.llm.stats(), time.perf_counter()
    while (now := time.perf_counter()) < start + seconds:
        if now >= start + interval * (prompts.num_added - 1):
            prompts.add()
        _step(bench, running, prompts)
    measured, after = time.perf_counter() - start, bench.llm.stats()
    gaps = sorted(running.gaps)
    while prompts.waiting:
        _step(bench, running, prompts)
    running.stop()
    if not gaps:
        raise EngineError(f"no stream had two tokens in {seconds} seconds: raise --seconds or lower --prompt-tokens.")
    median = statistics.median(gaps)
    floor = bench.limits.decode_seconds(streams, STREAM_PROMPT_TOKENS + output_tokens / 2)
    return {
        "start_seconds": round(bench.start_seconds, 2),
        "streams": streams,
        "output_tokens": output_tokens,
        "prompt_tokens": prompt_tokens,
        "interval_seconds": interval,
        "seconds": round(measured, 3),
        "gaps": len(gaps),
        "median_gap_ms": round(1e3 * median, 4),
        "floor_ms": rounded(None if floor is None else 1e3 * floor, 4),
        "fraction": rounded(fraction(floor, median), 3),
        "p99_gap_ms": round(1e3 * percentile(gaps, 99), 4),
        "p99_over_median": round(percentile(gaps, 99) / median, 2),
        "longest_gap_ms": round(1e3 * gaps[-1], 4),
        "prompts": len(prompts.seconds),
        "median_ttft_ms": round(1e3 * statistics.median(prompts.seconds), 3),
        "longest_ttft_ms": round(1e3 * max(prompts.seconds), 3),
        "output_tokens_per_second": round(len(gaps) / measured, 1),
        "steps": after["steps"] - before["steps"],
        "preemptions": after["preemptions"] - before["preemptions"],
    }


def percentile(ascending: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least so many percent of them do not exceed."""
    return ascending[max(0, math.ceil(len(ascending) * percent / 100) - 1)]


class _Streams:
    """Requests that decode at all times.

    Attributes:
        gaps: seconds between two tokens of a stream, of all of them.
    """

    def __init__(self, bench: Bench, count: int, output_tokens: int) -> None:
        self.gaps: list[float] = []
        self._bench = bench
        self._output_tokens = output_tokens
        self._live = [self._begin(max(2, (index + 1) * output_tokens // count)) for index in range(count)]
        self._read = [(0, 0.0)] * count  # tokens of each that were read, and when

    def _begin(self, output_tokens: int) -> Completion:
        return _queue(self._bench, self._bench.prompts(1, STREAM_PROMPT_TOKENS)[0], output_tokens)

    @property
    def all_decode(self) -> bool:
        """Whether each has a token."""
        return all(num_tokens for num_tokens, _ in self._read)

    def read(self, now: float) -> None:
        """Look at what the last step has read."""
        for index, completion in enumerate(self._live):
            seq = completion.seq
            num_read, when = self._read[index]
            num_tokens = seq.num_completion_tokens
            if num_tokens > num_read:
                if num_read:
                    self.gaps.append(now - when)
                self._read[index] = num_tokens, now
            if seq.is_finished:
                _check(completion)
                self._live[index], self._read[index] = self._begin(self._output_tokens), (0, 0.0)

    def stop(self) -> None:
        """End all of them."""
        self._bench.llm.step_loop.abandon([completion.seq for completion in self._live])


class _Prompts:
    """Long prompts.

    Attributes:
        waiting: those without a token, and when they arrived.
        seconds: to the first token of the others.
        num_added: how many have arrived.
    """

    def __init__(self, bench: Bench, prompts: list[list[int]]) -> None:
        self.waiting: list[tuple[Completion, float]] = []
        self.seconds: list[float] = []
        self.num_added = 0
        self._bench = bench
        self._prompts = prompts  # drawn before the clock starts: that takes as long as steps do

    def add(self) -> None:
        """One arrives."""
        arrival = time.perf_counter()
        self.waiting.append((_queue(self._bench, self._prompts[self.num_added], 1), arrival))
        self.num_added += 1

    def read(self, now: float) -> None:
        """Look at what the last step has read."""
        for completion, arrival in self.waiting:
            if completion.seq.is_finished:
                _check(completion)
                self.seconds.append(now - arrival)
        self.waiting = [entry for entry in self.waiting if not entry[0].seq.is_finished]


def _queue(bench: Bench, prompt: list[int], output_tokens: int) -> Completion:
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    (completion,) = bench.llm.queue_prompt(prompt, params)
    return completion


def _step(bench: Bench, streams: _Streams, prompts: _Prompts) -> None:
    loop = bench.llm.step_loop
    with loop.guard.turn():
        loop.advance()
    now = time.perf_counter()
    streams.read(now)
    prompts.read(now)


def _check(completion: Completion) -> None:
    seq = completion.seq
    if seq.finish_reason != "length":
        raise EngineError(f"a request ended by {seq.finish_reason!r} and not by its length: {seq.error}.")
