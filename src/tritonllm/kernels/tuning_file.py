"""A tuning table as a JSON file: written an entry a line, and checked whole when it is read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from tritonllm.errors import ConfigError
from tritonllm.kernels.skinny_form import KINDS, Form
from tritonllm.kernels.tuning_table import PATHS, TOKEN_BUCKETS, LinearKey, PathLimit, Tuning

_SKINNY_ROWS = TOKEN_BUCKETS[-1]  # all that `skinny_linear` takes


def as_json(tuning: Tuning) -> str:
    """The file, sorted and an entry a line, so that two tables can be compared by eye."""
    linears = [{**key._asdict(), "form": asdict(form)} for key, form in sorted(tuning.linears.items())]
    decode_paths = [
        {"hidden_size": size, "paths": [limit._asdict() for limit in limits]}
        for size, limits in sorted(tuning.decode_paths.items())
    ]
    parts = {
        "gpu": json.dumps(tuning.gpu),
        "date": json.dumps(tuning.date),
        "versions": json.dumps(dict(tuning.versions)),
        "linears": _lines(linears),
        "decode_paths": _lines(decode_paths),
    }
    return "{\n" + ",\n".join(f'  "{name}": {text}' for name, text in parts.items()) + "\n}\n"


def read_json(text: str, path: str) -> Tuning:
    """The table in a file that `as_json` wrote.

    Raises:
        ConfigError: one sentence with the path, the place in the file and what is wrong there.
    """
    return _Reader(path).table(text)


def _lines(entries: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in entries) + "\n  ]" if entries else "[]"


@dataclass(frozen=True)
class _Reader:
    """Reads a table and checks all of it, so that a wrong file is refused before anything runs by it."""

    path: str

    def table(self, text: str) -> Tuning:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"The tuning table {self.path} is not JSON: {error}.") from error
        table = self._object(value, "it", [field.name for field in fields(Tuning)])
        versions = self._object(table["versions"], "versions", ["torch", "triton"])
        for where, item in (("gpu", table["gpu"]), ("date", table["date"]), *versions.items()):
            self._check(isinstance(item, str) and item, where, item, "a non-empty string")
        linears: dict[LinearKey, Form] = {}
        for index, entry in enumerate(self._list(table["linears"], "linears")):
            key, form = self._linear(entry, f"linears[{index}]")
            self._check(key not in linears, f"linears[{index}]", dict(key._asdict()), "there only once")
            linears[key] = form
        decode_paths: dict[int, tuple[PathLimit, ...]] = {}
        for index, entry in enumerate(self._list(table["decode_paths"], "decode_paths")):
            where = f"decode_paths[{index}]"
            size, paths = self._object(entry, where, ["hidden_size", "paths"]).values()
            self._integer(f"{where}.hidden_size", size)
            self._check(size not in decode_paths, f"{where}.hidden_size", size, "there only once")
            decode_paths[size] = self._paths(paths, f"{where}.paths")
        return Tuning(table["gpu"], table["date"], versions, linears, decode_paths)

    def _paths(self, value: Any, where: str) -> tuple[PathLimit, ...]:
        limits: list[PathLimit] = []
        for index, entry in enumerate(self._list(value, where)):
            limit = PathLimit(**self._object(entry, f"{where}[{index}]", list(PathLimit._fields)))
            self._check(limit.path in PATHS, f"{where}[{index}].path", limit.path, "one of " + ", ".join(PATHS))
            self._integer(f"{where}[{index}].rows", limit.rows, high=_SKINNY_ROWS if limit.path == "skinny" else None)
            above = limits[-1].rows if limits else 0
            self._check(limit.rows > above, f"{where}[{index}].rows", limit.rows, f"above the {above} rows before it")
            limits.append(limit)
        return tuple(limits)

    def _linear(self, entry: Any, where: str) -> tuple[LinearKey, Form]:
        values = self._object(entry, where, [*LinearKey._fields, "form"])
        form = self._form(values.pop("form"), f"{where}.form")
        key = LinearKey(**values)
        for name in ("gated", "normed"):
            self._check(isinstance(values[name], bool), f"{where}.{name}", values[name], "true or false")
        self._integer(f"{where}.columns", key.columns)
        self._integer(f"{where}.rows", key.rows)
        self._check(not key.gated or key.rows % 2 == 0, f"{where}.rows", key.rows, "even, of gate and up")
        self._integer(f"{where}.tokens", key.tokens)
        buckets = ", ".join(map(str, TOKEN_BUCKETS))
        self._check(key.tokens in TOKEN_BUCKETS, f"{where}.tokens", key.tokens, f"one of {buckets}")
        self._check(
            form.kind != "gemv" or key.tokens == 1, f"{where}.tokens", key.tokens, "1, which is all that gemv takes"
        )
        return key, form

    def _form(self, value: Any, where: str) -> Form:
        values = self._object(value, where, [field.name for field in fields(Form)])
        kind = values.pop("kind")
        self._check(kind in KINDS, f"{where}.kind", kind, "one of " + ", ".join(KINDS))
        for name, number in values.items():
            self._integer(f"{where}.{name}", number)
            if name not in ("tiles", "num_stages"):
                self._check(number & (number - 1) == 0, f"{where}.{name}", number, "a power of two")
        form = Form(kind, **values)
        self._integer(f"{where}.block_k", form.block_k, low=16)  # no fewer for tensor cores, nor ever sensible
        self._integer(f"{where}.num_warps", form.num_warps, high=32)
        if kind == "gemv":
            self._integer(f"{where}.split", form.split, high=1)
        else:
            self._integer(f"{where}.tiles", form.tiles, high=1)
        if kind == "direct":
            self._integer(f"{where}.block_k", form.block_k, low=32)  # an operand is read in pieces of 32 columns
            self._integer(f"{where}.split", form.split, low=2)
        if kind == "gemv":
            self._integer(f"{where}.num_stages", form.num_stages, high=1)
        return form

    def _object(self, value: Any, where: str, names: list[str]) -> dict[str, Any]:
        """The items of a JSON object, in the order of `names`, which are exactly its keys."""
        self._check(isinstance(value, dict), where, value, "a JSON object")
        missing, unknown = [name for name in names if name not in value], sorted(set(value) - set(names))
        self._check(not missing, where, value, f"an object with {', '.join(missing)}")
        self._check(not unknown, where, value, f"an object without {', '.join(unknown)}")
        return {name: value[name] for name in names}

    def _list(self, value: Any, where: str) -> list[Any]:
        self._check(isinstance(value, list), where, value, "a list")
        return value

    def _integer(self, where: str, value: Any, low: int = 1, high: int | None = None) -> None:
        number = isinstance(value, int) and not isinstance(value, bool)
        allowed = f"{low}" if low == high else f"an integer >= {low}" + ("" if high is None else f" and <= {high}")
        self._check(number and low <= value and (high is None or value <= high), where, value, allowed)

    def _check(self, holds: object, where: str, value: Any, allowed: str) -> None:
        if not holds:
            shown = str(value) if len(str(value)) <= 120 else f"{str(value)[:120]}..."
            raise ConfigError(f"The tuning table {self.path} is wrong: {where} is {shown} and must be {allowed}.")
