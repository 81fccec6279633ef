"""Thousands of random requests through the scheduler and the pretend device, every invariant checked at every step.

    python tests/unit/scheduler_soak.py --requests 20000

A session is one random engine: rows, budget, pool, block size, end-of-text id. Its requests share beginnings, have
seeds, stop ids, limits and numbers of samples of their own, and are aborted anywhere, or meet NaN. At the end of a
session all are finished and the pool is full.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from fake_runner import FakeEngine

from tritonllm import SamplingParams, Sequence
from tritonllm.engine.samples import samples_of
from tritonllm.errors import RequestError

SESSION = 100


def run(num_requests: int, seed: int = 0) -> Counter[str]:
    """Run sessions until there were that many requests; what happened, counted."""
    generator = random.Random(seed)
    counts: Counter[str] = Counter()
    while counts["requests"] < num_requests:
        _session(generator, min(SESSION, num_requests - counts["requests"]), counts)
    return counts


def _session(generator: random.Random, num_requests: int, counts: Counter[str]) -> None:
    size = generator.choice([1, 2, 2, 4, 4, 16, 256])
    engine = FakeEngine(
        rows=generator.choice([1, 2, 5, 16, 32]),
        budget=generator.choice([1, 3, 16, 64, 64, 512]),
        blocks=generator.choice([2, 3, 8, 8, 20, 60]),
        block_size=size,
        eos=generator.choice([None, 5, 50]),
        max_model_length=generator.choice([None, None, 3 * size + 7]),
    )
    scheduler = engine.scheduler
    beginnings = [[kind] * generator.randint(0, 3 * size) for kind in range(4)]
    engine.before_reading = lambda tokens: _spoil(generator, engine, tokens, counts)
    counts["sessions"] += 1
    left = num_requests
    # Aborts and steps per arrival differ between sessions, so that queues are long in some and empty in others.
    arrivals, aborts = generator.choice([0.05, 0.3, 0.9]), generator.choice([0, 0.02, 0.1])
    while left or not scheduler.is_finished():
        while left and generator.random() < arrivals:
            left -= 1
            _add(generator, engine, beginnings, counts)
        if engine._live and generator.random() < aborts:
            seq = generator.choice(list(engine._live.values()))
            if not seq.is_finished:
                counts[f"aborted while {'preempted' if _preempted(seq) else seq.status.value}"] += 1
            scheduler.abort(seq)
        plan = engine.step()
        if plan is not None:
            counts["steps"] += 1
            counts["tokens computed"] += plan.num_tokens
            counts["chunks"] += len(plan.chunks)
            counts["partial chunks"] += sum(not chunk.sample for chunk in plan.chunks)
            counts["mixed steps"] += bool(plan.chunks and plan.num_decode_rows)
    counts["preemptions"] += scheduler.num_preemptions
    manager = scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks
    assert engine.finished.keys() == engine.sequences.keys()
    for seq in engine.sequences.values():
        counts[f"finished: {seq.finish_reason}"] += 1
        counts["tokens completed"] += seq.num_completion_tokens
        counts["cached tokens"] += seq.num_cached_tokens
        if seq.finish_reason == "length":
            assert len(seq) == seq.max_length
        ends = {*seq.sampling_params.stop_token_ids, *scheduler.eos_token_ids}
        assert seq.finish_reason != "stop" or seq.token_ids[-1] in ends


def _add(generator: random.Random, engine: FakeEngine, beginnings: list[list[int]], counts: Counter[str]) -> None:
    begin = generator.choice(beginnings)
    tail = [generator.randint(0, 2) for _ in range(generator.randint(0, 9))]
    prompt = begin[: generator.choice([len(begin), generator.randint(0, len(begin))])] + tail
    params = SamplingParams(
        max_tokens=generator.choice([1, 2, 7, 16, 40, 40, None]),
        ignore_eos=generator.random() < 0.5,
        seed=generator.randint(0, 1),
        stop_token_ids=generator.choice([(), (), (7,)]),
        n=generator.choice([1] * 9 + [4]),
    )
    counts["requests"] += 1
    try:
        first, *others = samples_of(prompt, params, engine.scheduler.block_size, 0)
        engine.add(first, others)
        counts["further samples"] += len(others)
    except RequestError:
        counts["refused"] += 1


def _spoil(generator: random.Random, engine: FakeEngine, tokens: list[int], counts: Counter[str]) -> None:
    """Now and then make one row of the step that is about to be read NaN, and with it what only it holds."""
    step = engine.scheduler._in_flight[0]
    seqs = [*step.decoded, *(seq for seq, chunk in step.prefilled if chunk.sample)]
    if not seqs or generator.random() > 0.002:
        return
    index = generator.randrange(len(seqs))
    if seqs[index].is_finished:
        return
    tokens[index] = -1
    blocks = engine.scheduler.block_manager._blocks
    engine.runner.poison([block for block in seqs[index].block_table if blocks[block].ref_count == 1])
    counts["NaN"] += 1


def _preempted(seq: Sequence) -> bool:
    return seq.status.value == "waiting" and seq.admission >= 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.perf_counter()
    counts = run(options.requests, options.seed)
    for name, count in sorted(counts.items()):
        sys.stdout.write(f"{name:28} {count:>10,}\n")
    sys.stdout.write(f"every invariant held at every step; {time.perf_counter() - start:.0f} s\n")


if __name__ == "__main__":
    main()
