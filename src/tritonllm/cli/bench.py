"""The commands that measure: `bench throughput`, `latency`, `ttft`, `streaming` and `startup`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tritonllm.cli.bench_options import (
    AllReduce,
    AsJson,
    BlockSize,
    Budget,
    Device,
    DType,
    EnforceEager,
    LoadFormat,
    MatrixRate,
    MemoryRate,
    Model,
    Output,
    PromptTokens,
    PromptTokensBeside,
    Runs,
    WorldSize,
    check_output,
    engine_config,
    numbers,
)
from tritonllm.cli.terminal import say
from tritonllm.sampling_params import SamplingParams
from tritonllm.structured_outputs import StructuredOutputsParams

bench_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure a model, and say how near the hardware's limit that is."
)

_BATCHES = "1,2,4,8,16,32,64,128,256"
_LENGTHS = "128,512,8192"
_BUDGET = 16384
_PLACES_FOR_PROMPTS = 8  # beside the streams


@bench_app.command()
def throughput(
    model: Model,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests, all there at the start.")] = 256,
    shortest: Annotated[int, typer.Option("--shortest", min=1, help="Fewest tokens of a prompt or output.")] = 100,
    longest: Annotated[int, typer.Option("--longest", min=1, help="Most tokens of a prompt or output.")] = 1024,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.6,
    seed: Annotated[int, typer.Option("--seed", help="Of the lengths and prompts.")] = 0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Say where the time goes as well, step by step; on a GPU.")
    ] = False,
    load_format: LoadFormat = "dummy",
    dtype: DType = "auto",
    device: Device = "auto",
    runs: Runs = 3,
    max_num_batched_tokens: Budget = _BUDGET,
    block_size: BlockSize = 256,
    enforce_eager: EnforceEager = False,
    world_size: WorldSize = 1,
    all_reduce: AllReduce = "auto",
    memory_rate: MemoryRate = None,
    matrix_rate: MatrixRate = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Output tokens per second of many random prompts at once."""
    if shortest > longest:
        raise typer.BadParameter(f"--shortest {shortest} is above --longest {longest}.")
    check_output(output)
    config = engine_config(
        model,
        load_format,
        dtype=dtype,
        device=device,
        block_size=block_size,
        enforce_eager=enforce_eager,
        world_size=world_size,
        all_reduce=all_reduce,
        max_num_sequences=num_prompts,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_length=2 * longest,
    )
    from tritonllm.bench.report import run
    from tritonllm.bench.throughput import measure, workload

    requests = workload(num_prompts, shortest, longest, seed)
    report = run(
        "throughput",
        model,
        config,
        memory_rate,
        matrix_rate,
        lambda it: measure(it, requests, temperature, runs, profile),
    )
    _tell(report, as_json, output)


@bench_app.command()
def latency(
    model: Model,
    batches: Annotated[str, typer.Option("--batches", help="Requests at once, separated by commas.")] = _BATCHES,
    prompt_tokens: PromptTokens = 128,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=2, help="Tokens of each output.")] = 512,
    profile: Annotated[bool, typer.Option("--profile", help="Say where the time of a step goes as well.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw latency over batch: a .png, .svg or .pdf file.")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="What the truncation of sampled tokens costs.")] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Other than 1: what controls of single tokens cost.")
    ] = 1.0,
    regex: Annotated[
        str | None, typer.Option("--regex", help="Outputs follow it, such as '[a-z ]*': what structured output costs.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="For --regex with random weights: a folder or hub id.")
    ] = None,
    load_format: LoadFormat = "dummy",
    dtype: DType = "auto",
    device: Device = "auto",
    runs: Runs = 3,
    max_num_batched_tokens: Budget = _BUDGET,
    block_size: BlockSize = 256,
    enforce_eager: EnforceEager = False,
    world_size: WorldSize = 1,
    all_reduce: AllReduce = "auto",
    memory_rate: MemoryRate = None,
    matrix_rate: MatrixRate = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Milliseconds a token at each batch size."""
    from tritonllm.bench.plot import SUFFIXES, plot_latency, require_matplotlib

    sizes = numbers("--batches", batches)
    if profile and output_tokens < 8:
        raise typer.BadParameter(f"--profile looks at the middle of at least 8 --output-tokens, not {output_tokens}.")
    if profile and regex is not None:
        raise typer.BadParameter("--profile takes steps apart in a way that those of --regex do not allow.")
    sampling = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        structured_outputs=None if regex is None else StructuredOutputsParams(regex=regex),
    )
    check_output(output)
    if plot is not None:
        if plot.suffix.lower() not in SUFFIXES:
            raise typer.BadParameter(f"--plot {plot} must end in one of {', '.join(SUFFIXES)}.")
        check_output(plot, "--plot")
        require_matplotlib()
    config = engine_config(
        model,
        load_format,
        dtype=dtype,
        device=device,
        block_size=block_size,
        enforce_eager=enforce_eager,
        world_size=world_size,
        all_reduce=all_reduce,
        max_num_sequences=max(sizes),
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_tokens_beside_decode=max_num_batched_tokens,  # the batch is to decode together, soon
        max_model_length=prompt_tokens + output_tokens,
        tokenizer=tokenizer,
    )
    from tritonllm.bench.latency import measure
    from tritonllm.bench.report import run

    report = run(
        "latency",
        model,
        config,
        memory_rate,
        matrix_rate,
        lambda it: measure(it, sizes, prompt_tokens, output_tokens, runs, profile, sampling),
    )
    _tell(report, as_json, output)
    if plot is not None:
        plot_latency(report, plot)
        say(f"The plot is in {plot}.")


@bench_app.command()
def ttft(
    model: Model,
    lengths: Annotated[str, typer.Option("--lengths", help="Tokens of a prompt, separated by commas.")] = _LENGTHS,
    load_format: LoadFormat = "dummy",
    dtype: DType = "auto",
    device: Device = "auto",
    runs: Runs = 3,
    max_num_batched_tokens: Budget = _BUDGET,
    block_size: BlockSize = 256,
    enforce_eager: EnforceEager = False,
    world_size: WorldSize = 1,
    all_reduce: AllReduce = "auto",
    memory_rate: MemoryRate = None,
    matrix_rate: MatrixRate = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Milliseconds to the first token of one prompt."""
    sizes = numbers("--lengths", lengths)
    check_output(output)
    config = engine_config(
        model,
        load_format,
        dtype=dtype,
        device=device,
        block_size=block_size,
        enforce_eager=enforce_eager,
        world_size=world_size,
        all_reduce=all_reduce,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_length=max(sizes) + 1,
    )
    from tritonllm.bench.report import run
    from tritonllm.bench.ttft import measure

    report = run("ttft", model, config, memory_rate, matrix_rate, lambda it: measure(it, sizes, runs))
    _tell(report, as_json, output)


@bench_app.command()
def streaming(
    model: Model,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Requests that decode at all times.")] = 64,
    prompt_tokens: PromptTokens = 8192,
    interval: Annotated[
        float, typer.Option("--interval", min=0.001, help="Seconds from one long prompt to the next.")
    ] = 1.0,
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="How long gaps are counted.")] = 20.0,
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", min=2, help="Tokens of a stream, which another one follows.")
    ] = 2048,
    load_format: LoadFormat = "dummy",
    dtype: DType = "auto",
    device: Device = "auto",
    world_size: WorldSize = 1,
    max_num_batched_tokens: Budget = _BUDGET,
    max_prefill_tokens_beside_decode: PromptTokensBeside = 512,
    block_size: BlockSize = 256,
    enforce_eager: EnforceEager = False,
    memory_rate: MemoryRate = None,
    matrix_rate: MatrixRate = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Gaps between the tokens of streams while long prompts arrive."""
    from tritonllm.bench.streaming import STREAM_PROMPT_TOKENS, measure

    check_output(output)
    config = engine_config(
        model,
        load_format,
        dtype=dtype,
        device=device,
        world_size=world_size,
        block_size=block_size,
        enforce_eager=enforce_eager,
        max_num_sequences=streams + _PLACES_FOR_PROMPTS,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_tokens_beside_decode=max_prefill_tokens_beside_decode,
        max_model_length=max(prompt_tokens + 1, output_tokens + STREAM_PROMPT_TOKENS),
    )
    from tritonllm.bench.report import run

    sizes = streams, output_tokens, prompt_tokens, interval, seconds
    report = run("streaming", model, config, memory_rate, matrix_rate, lambda it: measure(it, *sizes))
    _tell(report, as_json, output)


@bench_app.command()
def startup(
    model: Model,
    max_num_sequences: Annotated[
        int, typer.Option("--max-num-sequences", min=1, help="Most requests decoded at once: how many CUDA graphs.")
    ] = 256,
    max_model_length: Annotated[
        int, typer.Option("--max-model-length", min=4, help="Most tokens of prompt and output.")
    ] = 2048,
    load_format: LoadFormat = "dummy",
    dtype: DType = "auto",
    device: Device = "auto",
    runs: Runs = 3,
    max_num_batched_tokens: Budget = _BUDGET,
    block_size: BlockSize = 256,
    enforce_eager: EnforceEager = False,
    world_size: WorldSize = 1,
    all_reduce: AllReduce = "auto",
    triton_cache: Annotated[
        Path | None,
        typer.Option(
            "--triton-cache",
            exists=True,
            file_okay=False,
            help="Begin with a copy of this Triton cache, as `kernels precompile` fills one, not with an empty one.",
        ),
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Seconds until an engine is ready, with an empty Triton cache and with a warm one."""
    check_output(output)
    config = engine_config(
        model,
        load_format,
        dtype=dtype,
        device=device,
        block_size=block_size,
        enforce_eager=enforce_eager,
        world_size=world_size,
        all_reduce=all_reduce,
        max_num_sequences=max_num_sequences,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_length=max_model_length,
    )
    from tritonllm.bench.startup import measure

    _tell({"benchmark": "startup", "model": model, **measure(config, runs, triton_cache)}, as_json, output)


def _tell(report: dict[str, Any], as_json: bool, output: Path | None) -> None:
    from tritonllm.bench.report import as_text

    typer.echo(json.dumps(report) if as_json else as_text(report))
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
