"""Output tokens per second of many random prompts at once: `python -m tritonllm.bench.throughput MODEL`.

The workload that small engines are compared on: 256 prompts of 100 to 1,024 random tokens, 100 to 1,024 tokens of
output each, temperature 0.6, end-of-text ignored, prompts all different so that the prefix cache cannot help.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any


def workload(num_prompts: int, shortest: int, longest: int, seed: int) -> list[tuple[list[int], int]]:
    """`(token ids, output length)` of each request; with the defaults 142,827 prompt and 133,966 output tokens."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(shortest, longest))] for _ in range(num_prompts)]
    return [(prompt, rng.randint(shortest, longest)) for prompt in prompts]


def measure(llm: Any, requests: list[tuple[list[int], int]], temperature: float) -> dict[str, Any]:
    """Run the requests once; every output must have exactly its length."""
    from tritonllm import SamplingParams
    from tritonllm.errors import EngineError

    params = [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=index)
        for index, (_, length) in enumerate(requests)
    ]
    before = llm.stats()
    start = time.perf_counter()
    result = llm.generate([prompt for prompt, _ in requests], params)
    seconds = time.perf_counter() - start
    lengths = [len(tokens) for tokens in result["token_ids"]]
    if lengths != [length for _, length in requests]:
        raise EngineError("an output does not have the length that was asked for")
    after = llm.stats()
    return {
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(len(prompt) for prompt, _ in requests),
        "output_tokens": sum(lengths),
        "output_tokens_per_second": round(sum(lengths) / seconds, 1),
        "steps": after["steps"] - before["steps"],
        "preemptions": after["preemptions"] - before["preemptions"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=100)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    from tritonllm import LLMEngine

    start = time.perf_counter()
    llm = LLMEngine(
        options.model,
        load_format=options.load_format,
        max_num_sequences=options.num_prompts,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_length=2 * options.longest,
        enforce_eager=options.enforce_eager,
    )
    started = time.perf_counter() - start
    llm.generate([[1, 2, 3]])
    requests = workload(options.num_prompts, options.shortest, options.longest, options.seed)
    report = {"model": options.model, "start_seconds": round(started, 2), **measure(llm, requests, options.temperature)}
    llm.exit()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
