"""Which token ids end a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def stop_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], tokenizer: Any = None
) -> tuple[int, ...]:
    """Union of the end-of-text ids of config.json, generation_config.json and the tokenizer, in that order.

    Chat models spread them: often only generation_config.json names the id that ends a turn, or only the tokenizer.

    Args:
        config, generation_config: the files as dicts; `eos_token_id` is an int, a list of ints, null or absent.
        tokenizer: anything with an `eos_token_id`, or None.
    """
    sources = (
        config.get("eos_token_id"),
        generation_config.get("eos_token_id"),
        getattr(tokenizer, "eos_token_id", None),
    )
    ids: list[int] = []
    for source in sources:
        ids.extend(source if isinstance(source, (list, tuple)) else [] if source is None else [source])
    return tuple(dict.fromkeys(ids))
