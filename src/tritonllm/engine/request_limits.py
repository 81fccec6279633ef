"""Where a sequence will end, worked out once, when it enters the queue."""

from __future__ import annotations

from collections.abc import Iterable

from tritonllm.engine.controls import controls_of
from tritonllm.engine.sequence import Sequence


def set_limits(seq: Sequence, eos_token_ids: Iterable[int], limits: Iterable[int | None]) -> None:
    """Give a sequence its greatest length, the ids that end it, and the controls that depend on these.

    Args:
        eos_token_ids: of the model; they do not count for a request that ignores the end of text.
        limits: lengths of prompt and completion that it must not exceed, None where there is no such limit. That of the
            request itself, and its `max_tokens`, are added to them.
    """
    params = seq.sampling_params
    wanted = None if params.max_tokens is None else seq.num_prompt_tokens + params.max_tokens
    seq.max_length = min(limit for limit in (*limits, wanted, params.max_model_length) if limit is not None)
    seq.end_token_ids = frozenset(() if params.ignore_eos else eos_token_ids).union(params.stop_token_ids)
    controls = controls_of(params, seq.num_prompt_tokens, seq.end_token_ids, seq.bad_words)
    seq.sampling = seq.sampling._replace(controls=controls)
