"""From measured times to a tuning table: decisions alone, `linears` measures.

A form is kept where it is more than `WORTH` faster than the rules' choice. The fused layer serves up to the largest
bucket of tokens up to which, in every bucket, our four linears of a layer (with their norms, SiLU and adds) take less
than cuBLAS and the separate kernels: two norms with their adds, and SiLU. Attention, fused in the one and not in the
other, is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tritonllm.kernels.skinny_form import Form
from tritonllm.kernels.tuning_table import TOKEN_BUCKETS, LinearKey, Tuning

WORTH = 0.02
"""Of the time of the rules' choice; less is within what two measurements differ."""

LAYER_PARTS = ("qkv", "o", "gate_up", "down")
"""The linears of a decoder layer."""


@dataclass(frozen=True)
class LinearTimes:
    """Microseconds of one linear layer with one number of tokens.

    Attributes:
        model, part: which layer, for example "Qwen3-0.6B" and "qkv".
        key: its entry in a table.
        rules, rules_us: what the rules choose, and its time.
        best, best_us: the fastest form, maybe the same.
        separate_us: cuBLAS, with the separate kernels that do what ours includes.
    """

    model: str
    part: str
    key: LinearKey
    rules: Form
    rules_us: float
    best: Form
    best_us: float
    separate_us: float

    @property
    def is_worth_an_entry(self) -> bool:
        """Whether the fastest form is another than the rules' choice and beats it by more than noise."""
        return self.best != self.rules and self.best_us < self.rules_us * (1 - WORTH)

    @property
    def ours_us(self) -> float:
        """The time with the table that is made of it."""
        return self.best_us if self.is_worth_an_entry else self.rules_us


def make_table(times: Iterable[LinearTimes], gpu: str, date: str, versions: Mapping[str, str]) -> Tuning:
    """The tuning table of a GPU, from all that was measured on it."""
    times = list(times)
    return Tuning(gpu, date, versions, _winners(times), _fused_rows(times))


def _winners(times: list[LinearTimes]) -> dict[LinearKey, Form]:
    """Forms to keep. Of several layers with one key, with and without a residual, the one that gains most decides."""
    by_gain = sorted(times, key=lambda each: each.best_us / each.rules_us, reverse=True)
    return {each.key: each.best for each in by_gain if each.is_worth_an_entry}


def _fused_rows(times: list[LinearTimes]) -> dict[int, int]:
    """Hidden size to rows, for models of which a whole layer was measured, from one token on.

    Of several models with one hidden size the one that gains least decides.
    """
    rows: dict[int, int] = {}
    for model in {each.model: None for each in times}:
        layers = {
            tokens: {each.part: each for each in times if (each.model, each.key.tokens) == (model, tokens)}
            for tokens in TOKEN_BUCKETS
        }
        whole = [tokens for tokens, layer in layers.items() if set(LAYER_PARTS) <= set(layer)]
        if 1 not in whole:
            continue
        largest = 0
        for tokens in TOKEN_BUCKETS:
            if tokens not in whole or not _is_faster([layers[tokens][part] for part in LAYER_PARTS]):
                break
            largest = tokens
        hidden_size = layers[1]["qkv"].key.columns
        rows[hidden_size] = min(largest, rows.get(hidden_size, largest))
    return rows


def _is_faster(layer: list[LinearTimes]) -> bool:
    return sum(each.ours_us for each in layer) < sum(each.separate_us for each in layer)
