"""The commands that compile kernels for GPUs that need not be there: `kernels compile` and `kernels precompile`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tritonllm.cli.bench_options import BlockSize, Budget, DType, EnforceEager, engine_config
from tritonllm.cli.kernels_bench import kernels_bench
from tritonllm.cli.terminal import print_json, say
from tritonllm.errors import ConfigError

if TYPE_CHECKING:
    from tritonllm.config import EngineConfig
    from tritonllm.kernels.compile_matrix import Compiled
    from tritonllm.kernels.launch import Launch
    from tritonllm.kernels.targets import Target

kernels_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Compile a model's kernels for GPUs that need not be there, or measure them.",
)
kernels_app.command("bench")(kernels_bench)

MaxNumSequences = Annotated[
    int, typer.Option("--max-num-sequences", min=1, help="Most requests decoded at once, as the engine will have it.")
]
MaxModelLength = Annotated[
    int | None, typer.Option("--max-model-length", min=1, help="Most tokens of prompt and output, likewise.")
]
NumSms = Annotated[
    int | None, typer.Option("--num-sms", min=1, help="Multiprocessors of the GPU, where they are not the usual ones.")
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Processes that compile; one a core if left out.")
]


@kernels_app.command("compile")
def compile_kernels(
    model: Annotated[str, typer.Option("--model", help="Shipped shape, folder, .gguf file or hub id.")] = "Qwen3-0.6B",
    target: Annotated[
        list[str] | None, typer.Option("--target", help="Such as cuda:80,90 or hip:gfx942. All if left out.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Spilled registers are a failure, too.")] = False,
    dtype: DType = "auto",
    max_num_sequences: MaxNumSequences = 16,
    max_num_batched_tokens: Budget = 1024,
    max_model_length: MaxModelLength = None,
    block_size: BlockSize = 256,
    enforce_eager: EnforceEager = False,
    num_sms: NumSms = None,
    workers: Workers = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compile every kernel that a model's engine launches, and say how each came out.

    The exit code is 1 if one does not compile or needs more shared memory than the GPU has.
    """
    config = _config(
        model,
        dtype=dtype,
        max_num_sequences=max_num_sequences,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_length=max_model_length,
        block_size=block_size,
        enforce_eager=enforce_eager,
    )
    targets = _targets(target or [], num_sms)
    results = [
        {"shapes": _shapes(launch), **dataclasses.asdict(it), "ok": it.ok and not (strict and it.spills)}
        for it, launch in _compile(config, targets, workers)
    ]
    if as_json:
        print_json(results)
    else:
        typer.echo(_table(results))
    if not all(result["ok"] for result in results):
        raise typer.Exit(1)


@kernels_app.command()
def precompile(
    model: Annotated[str, typer.Option("--model", help="Shipped shape, folder, .gguf file or hub id.")],
    out: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder of the cache, made if missing.")],
    target: Annotated[str | None, typer.Option("--target", help="Such as cuda:90; the GPU here if left out.")] = None,
    dtype: DType = "auto",
    max_num_sequences: MaxNumSequences = 16,
    max_num_batched_tokens: Budget = 1024,
    max_model_length: MaxModelLength = None,
    block_size: BlockSize = 256,
    enforce_eager: EnforceEager = False,
    num_sms: NumSms = None,
    workers: Workers = None,
) -> None:
    """Fill a Triton cache for one GPU, so that an engine with these options compiles nothing at its start.

    It is used where TRITON_CACHE_DIR names the folder, with the same versions of Triton and of this package.
    """
    config = _config(
        model,
        dtype=dtype,
        max_num_sequences=max_num_sequences,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_length=max_model_length,
        block_size=block_size,
        enforce_eager=enforce_eager,
    )
    wanted = _one_target(target, num_sms)
    out.mkdir(parents=True, exist_ok=True)
    results = [it for it, _ in _compile(config, [wanted], workers, out)]
    failed = [it for it in results if not it.ok]
    for it in failed:
        say(f"{it.kernel}: {_reason(dataclasses.asdict(it))}")
    typer.echo(
        f"{len(results) - len(failed)} of {len(results)} kernels of {model} for {wanted.name} with {wanted.num_sms} "
        f"multiprocessors are in {out}"
    )
    if failed:
        raise typer.Exit(1)


def _config(model: str, **keys: Any) -> EngineConfig:
    """The engine's configuration: a checkpoint at hand describes itself, of another model the shape is looked up."""
    from tritonllm.bench.target import is_checkpoint

    return engine_config(model, "auto" if is_checkpoint(model) else "dummy", **keys)


def _targets(texts: Sequence[str], num_sms: int | None) -> list[Target]:
    from tritonllm.kernels.targets import parse_targets

    try:
        return parse_targets(texts, num_sms)
    except ConfigError as error:
        raise typer.BadParameter(f"--target: {error}") from error


def _one_target(text: str | None, num_sms: int | None) -> Target:
    from tritonllm.kernels.targets import present_target

    if text is not None:
        targets = _targets([text], num_sms)
        if len(targets) > 1:
            raise typer.BadParameter(f"--target {text} names {len(targets)} GPUs: a cache is filled for one at a time.")
        return targets[0]
    present = present_target()
    if present is None:
        raise typer.BadParameter("there is no GPU here: name one with --target, such as --target cuda:90.")
    return present if num_sms is None else dataclasses.replace(present, num_sms=num_sms)


def _compile(
    config: EngineConfig, targets: Sequence[Target], workers: int | None, cache: Path | None = None
) -> Iterator[tuple[Compiled, Launch]]:
    """Each kernel of an engine's start on each target, with a launch that needs it."""
    from tritonllm.engine.recorded_start import recorded_start
    from tritonllm.kernels.compile_matrix import compile_all, distinct

    launches: list[Launch] = []

    def jobs() -> Iterator[tuple[Any, Target]]:
        for target in targets:
            for variant, launch in distinct(recorded_start(config, target.counts_as), target).items():
                launches.append(launch)
                yield variant, target

    for index, result in enumerate(compile_all(jobs(), workers, cache)):
        yield result, launches[index]


def _shapes(launch: Launch) -> str:
    """Shapes of the first two tensors, as a hint at what the kernel is for."""
    values = [getattr(value, "base", value) for value in launch.args.values()]  # a descriptor's base is the tensor
    shapes = ["x".join(map(str, value.shape)) for value in values if hasattr(value, "shape")]
    return " ".join(shapes[:2])


def _reason(result: dict[str, Any]) -> str:
    if result["error"] is not None:
        return result["error"]
    if result["shared"] > result["shared_limit"]:
        return f"{result['shared']} bytes of shared memory, of {result['shared_limit']}"
    return f"{result['spills']} spilled"


def _table(results: Sequence[dict[str, Any]]) -> str:
    titles = ["kernel", "first shapes", "target", "", "KiB shared", "of", "registers", "spilled", "tensor cores"]
    rows = [
        [
            result["kernel"],
            result["shapes"],
            result["target"],
            "ok" if result["ok"] else "FAIL",
            f"{result['shared'] / 1024:.1f}",
            f"{result['shared_limit'] / 1024:g}",
            str(result["registers"]),
            str(result["spills"]),
            " ".join(result["tensor_core"]) or "-",
        ]
        for result in results
    ]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    to_the_right = range(4, 8)  # numbers
    lines = [
        "  ".join(
            cell.rjust(width) if column in to_the_right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (titles, *rows)
    ]
    failed = [result for result in results if not result["ok"]]
    lines += [f"FAIL {it['kernel']} ({it['shapes']}) for {it['target']}: {_reason(it)}" for it in failed]
    return "\n".join([*lines, f"{len(results) - len(failed)} of {len(results)} kernels are ok."])
