"""Output tokens per second of many random prompts at once: `tritonllm bench throughput MODEL`.

The workload that small engines are compared on: 256 prompts of 100 to 1,024 random tokens, 100 to 1,024 tokens of
output each, temperature 0.6, end-of-text ignored, prompts all different so that the prefix cache cannot help.
`python -m tritonllm.bench.throughput MODEL` is the same with `--json --runs 1`.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from tritonllm.bench.limits import fraction
from tritonllm.bench.timing import TOKEN_IDS, Bench, median_run, rounded, timed_generate
from tritonllm.bench.workload_profile import require_events, timed_steps, workload_profile
from tritonllm.sampling_params import SamplingParams


def workload(num_prompts: int, shortest: int, longest: int, seed: int) -> list[tuple[list[int], int]]:
    """`(token ids, output length)` of each request; with the defaults 142,827 prompt and 133,966 output tokens.

    The draws are those of `random.seed(seed)`: for each prompt its length and then its tokens, afterwards all output
    lengths.
    """
    rng = random.Random(seed)
    prompts = [
        [rng.randint(0, TOKEN_IDS - 1) for _ in range(rng.randint(shortest, longest))] for _ in range(num_prompts)
    ]
    return [(prompt, rng.randint(shortest, longest)) for prompt in prompts]


def measure(
    bench: Bench, requests: list[tuple[list[int], int]], temperature: float, runs: int, profile: bool = False
) -> dict[str, Any]:
    """Run the requests several times; the numbers are those of the run in the middle.

    Every run has first tokens of its own, so that none finds the prompts of the one before in the prefix cache. With
    `profile` one more run follows, whose steps are looked at one by one.
    """
    if profile:
        require_events(bench.llm)
    measured = [_run(bench, requests, temperature, index) for index in range(runs)]
    middle = median_run(measured, "seconds")
    looked_at: dict[str, Any] | None = None
    if profile:
        with timed_steps(bench.llm) as steps:
            started = time.perf_counter()
            seconds = _run(bench, requests, temperature, runs)["seconds"]
        looked_at = workload_profile(steps, started, seconds)
    lengths = [(len(prompt), length) for prompt, length in requests]
    output_tokens = sum(length for _, length in lengths)
    floor = bench.limits.workload_seconds(lengths)
    return {
        "start_seconds": round(bench.start_seconds, 2),
        "seconds": middle["seconds"],
        "prompt_tokens": sum(length for length, _ in lengths),
        "output_tokens": output_tokens,
        "output_tokens_per_second": middle["output_tokens_per_second"],
        "steps": middle["steps"],
        "preemptions": middle["preemptions"],
        "floor_seconds": rounded(floor, 3),
        "floor_output_tokens_per_second": rounded(output_tokens / floor if floor else None, 1),
        "fraction": rounded(fraction(floor, middle["seconds"]), 3),
        "runs": measured,
        "profile": looked_at,
    }


def _run(bench: Bench, requests: list[tuple[list[int], int]], temperature: float, index: int) -> dict[str, Any]:
    num_ids = min(TOKEN_IDS, bench.llm.model_config.vocab_size)
    prompts = [[(prompt[0] + index) % num_ids, *(token % num_ids for token in prompt[1:])] for prompt, _ in requests]
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=seed)
        for seed, (_, length) in enumerate(requests)
    ]
    before = bench.llm.stats()
    seconds = timed_generate(bench.llm, prompts, params)
    after = bench.llm.stats()
    return {
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(sum(length for _, length in requests) / seconds, 1),
        "steps": after["steps"] - before["steps"],
        "preemptions": after["preemptions"] - before["preemptions"],
    }


def main() -> None:
    from tritonllm.cli import main as command_line

    command_line(["bench", "throughput", "--json", "--runs", "1", *sys.argv[1:]])


if __name__ == "__main__":
    main()
