"""Thousands of mixed requests through an engine under pressure, each greedy output compared with the request alone.

    python tests/gpu/soak.py --requests 2000 --dtypes float32 bfloat16

The crowd: random lengths, shared beginnings, sampled neighbours, aborts, a pool small enough to preempt, prompts in
chunks. Alone: a second engine that serves one request at a time and never finds a prefix. Where the two differ first,
a reference without a cache scores both tokens, given all text before: float64 judges float32, float32 judges
bfloat16. Scores nearer than 4 times the logit error, that of the median position against that reference, are a near-
tie and counted apart; anything else is a mismatch. Exits with 1 if there is one, if more than 1 in 10,000 float32
tokens differ, if a block is lost, or if nobody was preempted.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from hf_twins import engine_logits
from naive_reference import NaiveDecoder, weights_of

from tritonllm import LLMEngine, SamplingParams
from tritonllm.engine.block_manager import BlockManager

REFERENCE = {"float32": torch.float64, "bfloat16": torch.float32}
TOLERANCE = 4
FLOAT32_LIMIT = 1e-4  # differing tokens a token compared


@dataclass
class Request:
    """One request of the crowd and what came of it.

    Attributes:
        prompt, params: what is asked.
        abort_after: steps after its arrival, None to let it finish.
        tokens, finish_reason, cached: as reported.
    """

    prompt: list[int]
    params: SamplingParams
    abort_after: int | None
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    cached: int = 0


@dataclass
class Verdict:
    """What a comparison found.

    Attributes:
        compared: tokens compared, each up to the first difference of its request.
        near_ties: gaps between the two scores that are within the tolerance.
        mismatches: a sentence for each difference that is not.
    """

    compared: int = 0
    near_ties: list[float] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)


def make_requests(
    generator: random.Random, count: int, vocab: int, longest: int, outputs: tuple[int, int]
) -> list[Request]:
    """Lengths spread evenly over orders of magnitude, one in 4 up to the longest; half begin like others.

    One in 16 is aborted. One in 5 is sampled and long; nobody computes those again alone: they are there to grow until
    others are preempted.
    """

    def text(length: int) -> list[int]:
        return [generator.randrange(vocab) for _ in range(length)]

    beginnings = [text(longest // 2) for _ in range(8)]
    requests = []
    for index in range(count):
        most = longest if generator.random() < 0.25 else max(longest // 20, 1)
        length = round(math.exp(generator.uniform(0, math.log(most))))
        prompt = text(length)
        if generator.random() < 0.5:
            shared = generator.choice(beginnings)[: generator.randint(1, max(most // 2, 1))]
            prompt = (shared + prompt)[: max(length, len(shared) + 1)]
        if generator.random() < 0.2:
            max_tokens = 8 * outputs[1]
            params = SamplingParams(temperature=0.8, top_p=0.9, seed=index, max_tokens=max_tokens, ignore_eos=True)
        else:
            params = SamplingParams(temperature=0, max_tokens=generator.randint(*outputs), ignore_eos=True)
        abort_after = generator.randint(0, 2 * outputs[1]) if generator.random() < 1 / 16 else None
        requests.append(Request(prompt, params, abort_after))
    return requests


def run_crowd(engine: LLMEngine, requests: list[Request], generator: random.Random) -> None:
    """Serve them all, arriving in gusts, and fill in what comes of them."""
    coming = deque(requests)
    present: dict[int, Request] = {}
    aborts: list[tuple[int, int]] = []
    step = 0
    while coming or not engine.scheduler.is_finished():
        gust = generator.choice([0, 0, 1, 4, 16])
        while coming and gust and engine.stats()["waiting"] < 64:
            gust -= 1
            request = coming.popleft()
            seq_id = engine.add_prompt(request.prompt, request.params)
            present[seq_id] = request
            if request.abort_after is not None:
                aborts.append((step + request.abort_after, seq_id))
        for when, seq_id in aborts:
            if when == step and seq_id in present:
                engine.abort(seq_id)
        for output in engine.step()[0]:
            request = present.pop(output.seq_id)
            request.tokens, request.finish_reason = output.token_ids, output.finish_reason
            request.cached = output.num_cached_tokens
        step += 1


def run_alone(engine: LLMEngine, request: Request) -> list[int]:
    """What an engine gives that serves nobody else and has never seen this text."""
    engine.scheduler.block_manager = BlockManager(engine.runner.num_blocks, engine.config.block_size)
    return engine.generate([request.prompt], request.params)["token_ids"][0]


def measure_error(engine: LLMEngine, reference: NaiveDecoder, texts: list[list[int]]) -> torch.Tensor:
    """Largest difference of a logit from the reference at each position: prompt in two chunks, then decoded."""
    errors = []
    for text in texts:
        decode_from = max(1, len(text) - 16)
        logits = engine_logits(engine, text, sorted({max(1, decode_from // 2), decode_from}), decode_from)
        errors.append((logits.double() - reference.logits(text, len(text)).double()).abs().amax(dim=-1))
    return torch.cat(errors)


def judge(request: Request, alone: list[int], reference: NaiveDecoder, tolerance: float, verdict: Verdict) -> None:
    """Compare one output, which may be the beginning of one, with the tokens of the request alone."""
    ours = request.tokens
    expected = alone[: len(ours)] if request.finish_reason == "abort" else alone
    at = next((i for i, (a, b) in enumerate(zip(ours, expected, strict=False)) if a != b), None)
    verdict.compared += len(ours) if at is None else at + 1
    if at is None:
        if len(ours) != len(expected):
            verdict.mismatches.append(f"{len(ours)} tokens instead of {len(expected)}")
        return
    scores = reference.logits(request.prompt + expected[:at], 1)[0]
    gap = abs(scores[ours[at]] - scores[expected[at]]).item()
    if gap < tolerance:
        verdict.near_ties.append(gap)
    else:
        verdict.mismatches.append(
            f"prompt of {len(request.prompt)} tokens ({request.cached} cached): token {at} is {ours[at]} and alone "
            f"{expected[at]}, whose scores are {gap:.3g} apart, more than {tolerance:.3g}"
        )


def soak(model: str, dtype: str, options: argparse.Namespace) -> bool:
    """Run one soak and print what it found; True if all is well."""
    device = torch.device(options.device)
    longest, outputs = options.longest, (options.outputs[0], options.outputs[1])
    sized = {
        "dtype": dtype,
        "device": options.device,
        "block_size": options.block_size,
        "max_model_length": longest + outputs[1],
        "load_format": "dummy" if options.dummy else "auto",
    }
    blocks = -(-(longest + outputs[1]) // options.block_size)
    crowd_blocks = max(blocks + 1, int(options.pool * blocks))
    clock = time.perf_counter
    begin = clock()
    crowd = LLMEngine(
        model,
        **sized,
        max_num_sequences=options.rows,
        max_num_batched_tokens=options.budget,
        max_cached_blocks=crowd_blocks,
    )
    generator = random.Random(options.seed)
    requests = make_requests(generator, options.requests, crowd.model_config.vocab_size, longest, outputs)
    started = clock()
    run_crowd(crowd, requests, generator)
    served = clock()
    stats, config = crowd.stats(), crowd.model_config
    crowd.exit()
    alone = LLMEngine(
        model, **sized, max_num_sequences=1, max_num_batched_tokens=longest + outputs[1], max_cached_blocks=blocks + 1
    )
    tensors = weights_of(model, config, options.dummy, device)
    reference = NaiveDecoder(config, tensors, getattr(torch, dtype), REFERENCE[dtype], device)
    greedy = [request for request in requests if request.params.temperature == 0]
    compared = greedy if options.alone is None else greedy[:: max(1, len(greedy) // options.alone)]
    lengths = [min(length, longest) for length in (16, 300, 2000)]
    texts = [(greedy[index].prompt + greedy[-1 - index].prompt)[:length] for index, length in enumerate(lengths)]
    errors = measure_error(alone, reference, texts)
    # The usual error, not the worst: some models are far off at a few positions, and that would excuse everything.
    tolerance = TOLERANCE * errors.median().item()
    verdict = Verdict()
    ready = clock()
    for request in compared:
        judge(request, run_alone(alone, request), reference, tolerance, verdict)
    alone.exit()
    whole = stats["free_blocks"] == stats["total_blocks"] and all(request.finish_reason for request in requests)
    differing = len(verdict.near_ties) + len(verdict.mismatches)
    few = dtype != "float32" or differing <= FLOAT32_LIMIT * max(verdict.compared, 1 / FLOAT32_LIMIT)
    report = {
        "model": f"{model}, {dtype}",
        "requests": f"{len(requests)} ({sum(r.finish_reason == 'abort' for r in requests)} aborted)",
        "prompt tokens": f"{sum(len(r.prompt) for r in requests):,} ({sum(r.cached for r in requests):,} cached)",
        "steps of the crowd": f"{stats['steps']:,} of at most {options.rows} sequences and {options.budget} tokens",
        "preemptions": f"{stats['preemptions']:,} in a pool of {stats['total_blocks']} blocks of {options.block_size}",
        "pool at the end": f"{stats['free_blocks']} of {stats['total_blocks']} blocks free",
        "outputs compared": f"{len(compared)} of {len(greedy)} greedy ones",
        "tokens compared": f"{verdict.compared:,}",
        "logit error": f"{errors.median():.3g} against {REFERENCE[dtype]}, at the worst position {errors.max():.3g}",
        "near-ties": f"{len(verdict.near_ties)}, the widest {max(verdict.near_ties, default=0):.3g} of {tolerance:.3g}",
        "mismatches": f"{len(verdict.mismatches)}",
        "seconds": f"{started - begin:.0f} start, {served - started:.0f} crowd, {clock() - ready:.0f} alone",
    }
    for name, value in report.items():
        sys.stdout.write(f"{name:20} {value}\n")
    for sentence in verdict.mismatches[:20]:
        sys.stdout.write(f"  {sentence}\n")
    sys.stdout.write("\n")
    sys.stdout.flush()
    return whole and few and stats["preemptions"] > 0 and not verdict.mismatches


def main(arguments: list[str] | None = None) -> int:
    """Run every dtype asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="a name or path, or 'tiny' for a random one")
    parser.add_argument("--dummy", action="store_true", help="dummy weights of the shape of that name")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(REFERENCE), default=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--alone", type=int, help="compare about that many outputs instead of all greedy ones")
    parser.add_argument("--longest", type=int, default=8000, help="tokens of the longest prompt")
    parser.add_argument("--outputs", type=int, nargs=2, default=[8, 64], help="fewest and most tokens of an output")
    parser.add_argument("--pool", type=float, default=2.0, help="cache of the crowd, in longest requests")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64, help="sequences at a time")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        torch.set_num_threads(1)  # tiny models spend their time waiting for threads, not computing
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model == "tiny":
            from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

            model = f"{folder}/tiny"
            save_tiny_checkpoint(tiny_hf_config("llama", heads="9/3x64"), model)
        return 0 if all([soak(model, dtype, options) for dtype in options.dtypes]) else 1


if __name__ == "__main__":
    sys.exit(main())
