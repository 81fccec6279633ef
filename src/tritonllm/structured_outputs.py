"""What form a text must have: `StructuredOutputsParams`, checked when it is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritonllm.config.checks import Rule, check_fields, text, texts
from tritonllm.errors import RequestError

_RULES: dict[str, Rule] = {
    "json": text().or_none(),
    "regex": text().or_none(),
    "choice": Rule(texts().allowed, lambda value: value != () and texts().accepts(value)).or_none(),
    "grammar": text().or_none(),
}


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of a completion. Exactly one field is given; the names are vLLM's.

    A value of the wrong type raises `RequestError` (a ValueError). Whether a schema, expression or grammar can be
    compiled shows when a request is made with it, before anything is queued.

    Attributes:
        json: a JSON schema, a mapping or its text: the completion is JSON that fits. Stored as text. What llguidance
            reads of JSON schema counts; a keyword that it does not know how to enforce is refused.
        regex: a regular expression in the syntax of Rust's `regex`, without look-around: it matches the whole
            completion.
        choice: strings, one of which is the completion.
        grammar: a context-free grammar in llguidance's dialect of Lark, whose first rule is `start`.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "json", _schema_text(self.json))
        if isinstance(self.choice, (list, str)):
            object.__setattr__(self, "choice", (self.choice,) if isinstance(self.choice, str) else tuple(self.choice))
        check_fields(self, _RULES, RequestError)
        given = [name for name in _RULES if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(f"structured outputs with {' and '.join(given) or 'nothing'}: give exactly one of them.")


def _schema_text(schema: object) -> object:
    """A JSON schema as text; what is no schema as it is, for the rules to refuse."""
    if isinstance(schema, Mapping):
        try:
            return json.dumps(dict(schema))
        except (TypeError, ValueError) as error:
            raise RequestError(f"json={schema!r} cannot be written as JSON: {error}.") from error
    if isinstance(schema, str):
        try:
            known = isinstance(json.loads(schema), dict)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json={schema[:200]!r} is not JSON that can be read: {error}.") from error
        if not known:
            raise RequestError(f"json={schema!r} is not a schema: give a JSON object.")
    return schema
