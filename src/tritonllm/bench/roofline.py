"""What a model can do at best on a GPU that need not be here: `tritonllm roofline MODEL --gpu h200`.

Everything follows from config.json and two rates; `limits` has the arithmetic. The rates of an H200 were measured.
Those of the others are their data sheets' times what the H200 reaches of its own: 4.3 of 4.8 TB/s, 700 of 989 TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritonllm.bench.limits import MEASURED, Limits, Rates
from tritonllm.config import ModelConfig
from tritonllm.errors import ConfigError

_FRACTIONS = (4.3 / 4.8, 700 / 989)
_USABLE = 0.9  # of the memory: the rest is for activations, graphs and the runtime


@dataclass(frozen=True)
class Gpu:
    """A data sheet: memory in GB and TB/s, dense bfloat16 products summed in float32 in TFLOP/s."""

    name: str
    gigabytes: float
    memory: float
    matrix: float

    @property
    def rates(self) -> Rates:
        """What it reaches, measured or as expected."""
        memory, matrix = _FRACTIONS
        expected = Rates(self.memory * memory * 1e12, self.matrix * matrix * 1e12)
        return MEASURED.get(self.name, expected)


GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        Gpu("B200", 180, 8.0, 2250),
        Gpu("H200", 141, 4.8, 989),
        Gpu("H100", 80, 3.35, 989),
        Gpu("A100", 80, 2.04, 312),
        Gpu("L40S", 48, 0.864, 362),
        Gpu("L4", 24, 0.3, 121),
        Gpu("A10", 24, 0.6, 125),
        Gpu("RTX5090", 32, 1.792, 209.5),
        Gpu("RTX4090", 24, 1.008, 165.2),
        Gpu("RTX3090", 24, 0.936, 71),
        Gpu("MI300X", 192, 5.3, 1307),
    )
}


def find_gpu(name: str) -> Gpu:
    """A GPU by name, however it is written: `rtx 4090`, `RTX4090`.

    Raises:
        ConfigError: it is not in the table.
    """
    key = name.lower().replace(" ", "").replace("-", "").replace("_", "")
    if key not in GPUS:
        raise ConfigError(
            f"there is no data sheet of {name!r}: give one of {', '.join(GPUS)}, or the nearest of them with "
            "--memory-rate and --matrix-rate."
        )
    return GPUS[key]


def predict(
    model: ModelConfig,
    dtype: str,
    gpu: Gpu,
    rates: Rates,
    batches: Sequence[int],
    contexts: Sequence[int],
    prompts: Sequence[int],
) -> dict[str, Any]:
    """The least time of decode steps and of prompts.

    Returns:
        `weights_gb`, `kv_bytes_per_token`, `cache_tokens` that fit beside the weights; `decode`, one entry for each
        batch and context with `ms`, `tokens_per_second` and what bounds it, None in place of numbers if its cache does
        not fit; `prefill`, one entry for each prompt length.
    """
    limits = Limits(model, dtype, rates)
    room = _USABLE * gpu.gigabytes * 1e9 - limits.weight_bytes
    cache_tokens = max(int(room // limits.kv_bytes_per_token), 0)
    return {
        "gpu": gpu.name,
        "dtype": dtype,
        "memory_rate": rates.memory,
        "matrix_rate": rates.matrix,
        "weights_gb": round(limits.weight_bytes / 1e9, 3),
        "kv_bytes_per_token": limits.kv_bytes_per_token,
        "cache_tokens": cache_tokens,
        "decode": [_decode(limits, rates, batch, context, cache_tokens) for batch in batches for context in contexts],
        "prefill": [_prefill(limits, rates, length) for length in prompts],
    }


def _decode(limits: Limits, rates: Rates, batch: int, context: int, cache_tokens: int) -> dict[str, Any]:
    seconds = limits.decode_seconds(batch, context)
    fits = batch * context <= cache_tokens
    by_memory = limits.decode_bytes(batch, context) / rates.memory
    return {
        "batch": batch,
        "context": context,
        "ms": round(1e3 * seconds, 3) if fits and seconds else None,
        "tokens_per_second": round(batch / seconds, 1) if fits and seconds else None,
        "bound": ("memory" if by_memory >= (seconds or 0.0) else "matrix") if fits else None,
    }


def _prefill(limits: Limits, rates: Rates, length: int) -> dict[str, Any]:
    seconds = limits.prefill_seconds(length) or 0.0
    by_memory = limits.weight_bytes / rates.memory
    return {
        "tokens": length,
        "ms": round(1e3 * seconds, 3),
        "tokens_per_second": round(length / seconds, 1),
        "bound": "memory" if by_memory >= seconds else "matrix",
    }


def table(model: str, report: Mapping[str, Any]) -> Iterator[str]:
    """The lines that a person reads."""
    rates = f"{report['memory_rate'] / 1e12:.2f} TB/s, {report['matrix_rate'] / 1e12:.0f} TFLOP/s"
    yield f"{model} in {report['dtype']} on one {report['gpu']} at {rates}"
    room = f"room for {report['cache_tokens']:,} tokens" if report["cache_tokens"] else "no room beside the weights"
    yield f"weights {report['weights_gb']:.2f} GB, cache {report['kv_bytes_per_token'] / 1024:.0f} KiB a token, {room}"
    yield ""
    yield "decode      batch   context   ms a step    tokens/s   bound by"
    for row in report["decode"]:
        if row["ms"] is None:
            yield f"       {row['batch']:10,} {row['context']:9,}   the cache does not fit"
        else:
            numbers = f"{row['ms']:11.3f} {row['tokens_per_second']:11,.0f}"
            yield f"       {row['batch']:10,} {row['context']:9,} {numbers}   {row['bound']}"
    yield ""
    yield "first token          tokens          ms    tokens/s   bound by"
    for row in report["prefill"]:
        yield f"       {row['tokens']:20,} {row['ms']:11.3f} {row['tokens_per_second']:11,.0f}   {row['bound']}"
