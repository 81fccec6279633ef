"""Which cases are measured: those of a model, or the rows of a JSON file, each with the bar it has to reach."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from tritonllm.bench.kernels.attention import FORMS, DecodeAttention, FusedDecodeAttention, PrefillAttention
from tritonllm.bench.kernels.case import Case, Heads
from tritonllm.bench.kernels.elementwise import (
    AddRmsNorm,
    AdvanceRows,
    GeluAndMul,
    LoadRows,
    LongestFirst,
    RmsNorm,
    SiluAndMul,
)
from tritonllm.bench.kernels.linears import HopperLinear, HopperLinearParts, SkinnyLinear
from tritonllm.bench.kernels.logits import AdjustLogits, TokenLogprobs
from tritonllm.bench.kernels.rotation import ApplyRope, RopeStoreKv, StoreKv
from tritonllm.bench.kernels.sampling import KeptThreshold, MergePicks, PickFromShard, PickTokens, SampleTokens
from tritonllm.bench.limits import Limits
from tritonllm.bench.linear_layers import layers_of_config
from tritonllm.config import ModelConfig
from tritonllm.errors import ConfigError
from tritonllm.kernels.skinny_linear import MAX_ROWS

CASES: dict[str, type[Case]] = {
    case.op: case
    for case in (
        AddRmsNorm, AdjustLogits, AdvanceRows, ApplyRope, DecodeAttention, FusedDecodeAttention, GeluAndMul,
        HopperLinear, HopperLinearParts, KeptThreshold, LoadRows, LongestFirst, MergePicks, PickFromShard, PickTokens,
        PrefillAttention, RmsNorm, RopeStoreKv, SampleTokens, SiluAndMul, SkinnyLinear, StoreKv, TokenLogprobs,
    )
}  # fmt: skip
"""By the op's name, all ops of `tritonllm.kernels`."""

_RANKS = 2  # over which the rows of sharded ops split the vocabulary


@dataclass(frozen=True)
class Bar:
    """What a row has to reach; None where nothing is asked.

    Attributes:
        us: microseconds at most.
        tflops: tera-operations a second at least.
        rival: whose time it must not exceed.
    """

    us: float | None = None
    tflops: float | None = None
    rival: str | None = None

    def __str__(self) -> str:
        parts = []
        if self.us is not None:
            parts.append(f"<= {self.us:g} us")
        if self.tflops is not None:
            parts.append(f">= {self.tflops:g} TFLOP/s")
        if self.rival is not None:
            parts.append(f"<= {self.rival}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Row:
    """A case and its bar, if it has one."""

    case: Case
    bar: Bar | None = None


def model_rows(
    model: ModelConfig, normed: bool, batches: Sequence[int], context: int, prompt_tokens: int, block_size: int
) -> list[Row]:
    """Every op as a model's engine calls it: in decode steps of these batches, then in a prefill of one prompt.

    Args:
        model: the model.
        normed: whether its queries and keys have a norm.
        batches: rows of decode steps.
        context: keys of each row.
        prompt_tokens: of the prompt.
        block_size: tokens of a cache block.
    """
    cases = [case for batch in batches for case in _decode_cases(model, normed, batch, context, block_size)]
    return [Row(case) for case in (*cases, *_prefill_cases(model, normed, prompt_tokens, block_size))]


def _decode_cases(model: ModelConfig, normed: bool, batch: int, context: int, block_size: int) -> Iterator[Case]:
    heads, hidden, vocab = _heads(model), model.hidden_size, model.vocab_size
    yield LoadRows(batch, context, block_size)
    yield LongestFirst(batch)
    yield RmsNorm(batch, hidden)
    yield AddRmsNorm(batch, hidden)
    yield RopeStoreKv(heads, batch, normed, block_size)
    for window in _windows(model, context):
        yield DecodeAttention(heads, batch, context, block_size, window)
        yield FusedDecodeAttention(heads, batch, context, normed, block_size, window)
    yield SiluAndMul(batch, model.intermediate_size)
    yield GeluAndMul(batch, model.intermediate_size)
    for layer in layers_of_config("", model):
        if batch <= MAX_ROWS:
            yield SkinnyLinear(batch, layer.columns, layer.rows, layer.normed, layer.gated, layer.residual)
        if layer.residual:  # the norm that follows adds up parts
            yield HopperLinearParts(batch, layer.columns, layer.rows)
        else:
            yield HopperLinear(batch, layer.columns, layer.rows, layer.gated)
    for greedy in (True, False):
        yield PickTokens(vocab, batch, greedy=greedy)
    for logits in ("peaked", "flat"):
        yield KeptThreshold(vocab, batch, logits, top_p=0.9)
        yield SampleTokens(vocab, batch, logits, top_p=0.9)
    yield PickFromShard(-(-vocab // _RANKS), batch)
    yield MergePicks(batch, _RANKS)
    yield AdjustLogits(vocab, batch)
    yield TokenLogprobs(vocab, batch)
    yield AdvanceRows(batch, context, block_size)


def _prefill_cases(model: ModelConfig, normed: bool, tokens: int, block_size: int) -> Iterator[Case]:
    heads, hidden = _heads(model), model.hidden_size
    yield RmsNorm(tokens, hidden)
    yield AddRmsNorm(tokens, hidden)
    yield ApplyRope(heads, tokens)
    yield StoreKv(heads, tokens, block_size)
    yield RopeStoreKv(heads, tokens, normed, block_size)
    for window in _windows(model, tokens):
        for form in FORMS if window is None else ("portable",):
            yield PrefillAttention(form, heads, 1, tokens, block_size=block_size, window=window)
    yield SiluAndMul(tokens, model.intermediate_size)
    yield GeluAndMul(tokens, model.intermediate_size)


def _windows(model: ModelConfig, length: int) -> list[int | None]:
    """The different windows that layers of a model have in a text of that length, None for the whole of it."""
    windows = Limits(model, "bfloat16", None).windows
    return list(dict.fromkeys(None if window is None or window >= length else window for window in windows))


def _heads(model: ModelConfig) -> Heads:
    return Heads(model.num_heads, model.num_kv_heads, model.head_dim)


def shipped_rows() -> list[str]:
    """Names of the lists of rows that come with the package."""
    files = (resources.files("tritonllm.bench.kernels") / "rows").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files)


def read_rows(name: str) -> list[Row]:
    """The rows of a JSON file, or of a shipped list of that name.

    A file is a list of objects: `op`, the fields of its case, and maybe `bar`, an object with some fields of `Bar`.

    Raises:
        ConfigError: there is no such file or list, or it is not written like that.
    """
    path = Path(name)
    if path.is_file():
        text = path.read_text(encoding="utf-8")
    elif name in shipped_rows():
        text = (resources.files("tritonllm.bench.kernels") / "rows" / f"{name}.json").read_text(encoding="utf-8")
    else:
        raise ConfigError(f"{name!r} is no file and none of the shipped lists of rows: {', '.join(shipped_rows())}.")
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not readable as JSON: {error}.") from error
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{name} must hold a list of objects, one for each row.")
    return [_row(f"row {index} of {name}", entry) for index, entry in enumerate(entries, 1)]


def _row(where: str, entry: Mapping[str, Any]) -> Row:
    keys = dict(entry)
    op, bar = keys.pop("op", None), keys.pop("bar", None)
    if op not in CASES:
        raise ConfigError(f"{where}: op is {op!r}, which must be one of {', '.join(CASES)}.")
    if bar is not None and not isinstance(bar, dict):
        raise ConfigError(f"{where}: bar must be an object, not {bar!r}.")
    case = _made(where, CASES[op], keys)
    return Row(case, None if bar is None else _made(f"the bar in {where}", Bar, bar))


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "bool": (bool,), "str": (str,), "float": (int, float), "Heads": (str,),
    "float | None": (int, float), "str | None": (str,), "int | None": (int,),
}  # fmt: skip


def _made(where: str, cls: Any, keys: Mapping[str, Any]) -> Any:
    """A dataclass from JSON, each value of its type, numbers above 0."""
    known = {field.name: field for field in fields(cls)}
    if unknown := [key for key in keys if key not in known]:
        raise ConfigError(f"{where} has {unknown[0]!r}, which is none of {', '.join(known)}.")
    if missing := [name for name, field in known.items() if field.default is MISSING and name not in keys]:
        raise ConfigError(f"{where} has no {missing[0]!r}.")
    made: dict[str, Any] = {}
    for name, value in keys.items():
        kind = str(known[name].type)
        if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise ConfigError(f"{where}: {name} is {value!r}, which is no {kind.removesuffix(' | None')}.")
        if isinstance(value, (int, float)) and kind != "bool" and not value > (-1 if name == "prefix" else 0):
            raise ConfigError(f"{where}: {name} is {value}, which is too small.")
        made[name] = Heads.parse(str(value)) if kind == "Heads" else value
    return cls(**made)
