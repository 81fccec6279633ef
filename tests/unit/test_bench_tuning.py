"""`python -m tritonllm.bench.linears --tune --write`: from made-up times to a table, and what the command refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tritonllm.bench import linears
from tritonllm.bench.linear_layers import Shape, candidates, layers_of
from tritonllm.bench.target import shipped_shapes
from tritonllm.bench.tuning import LAYER_PARTS, LinearTimes, make_table
from tritonllm.kernels.skinny_form import Form, gemv
from tritonllm.kernels.skinny_table import choose_form
from tritonllm.kernels.tuning_file import as_json, read_json
from tritonllm.kernels.tuning_table import TOKEN_BUCKETS, UNTUNED, LinearKey, Tuning

VERSIONS = {"torch": "2.11.0", "triton": "3.6.0"}
RULES, FASTER = Form("looped", 32, 64, 4), Form("looped", 16, 64, 4, split=4)
COLUMNS = {"qkv": 1024, "o": 2048, "gate_up": 1024, "down": 3072, "head": 1024}


def times(part: str = "qkv", tokens: int = 1, rules: float = 10, best: float = 10, separate: float = 12, **other: Any):
    """One layer's times; the fastest form is another than the rules' where its time is."""
    key = LinearKey(COLUMNS[part], 4096, part == "gate_up", part in ("qkv", "gate_up"), tokens)
    form = RULES if best == rules else FASTER
    return replace(LinearTimes("a model", part, key, RULES, rules, form, best, separate), **other)


def layer(tokens: int, **changes: Any) -> list[LinearTimes]:
    return [times(part, tokens, **changes) for part in LAYER_PARTS]


def table(found: list[LinearTimes]) -> Tuning:
    return make_table(found, "a GPU", "2026-01-02", VERSIONS)


class TestForms:
    @pytest.mark.parametrize(("best", "kept"), [(9.79, True), (9.81, False), (10, False), (11, False)])
    def test_only_more_than_two_percent_is_kept(self, best: float, kept: bool) -> None:
        assert table([times(best=best)]).linears == ({times().key: FASTER} if kept else {})

    def test_the_rules_choice_never_beats_itself(self) -> None:
        """It is timed twice where it is the fastest."""
        assert table([replace(times(best=5), best=RULES)]).linears == {}

    def test_each_bucket_is_an_entry_of_its_own(self) -> None:
        found = [times(tokens=tokens, best=9 if tokens in (2, 8) else 10) for tokens in TOKEN_BUCKETS]
        assert [key.tokens for key in table(found).linears] == [2, 8]

    def test_of_two_layers_with_one_key_the_larger_gain_decides(self) -> None:
        found = [times(best=8), replace(times(best=9), best=gemv(256, 4, 4))]
        assert table(found).linears == table(found[::-1]).linears == {times().key: FASTER}

    def test_where_it_was_measured(self) -> None:
        made = table([])
        assert (made.gpu, made.date, made.versions) == ("a GPU", "2026-01-02", VERSIONS)
        assert (made.linears, made.fused_rows) == ({}, {})


class TestFusedRows:
    def rows(self, *found: list[LinearTimes]) -> dict[int, int]:
        return table([each for measured in found for each in measured]).fused_rows

    def test_the_largest_bucket_in_which_the_layer_is_faster(self) -> None:
        slower = {"separate": 9}
        assert self.rows(*(layer(tokens) for tokens in TOKEN_BUCKETS)) == {1024: 16}
        assert self.rows(layer(1), layer(2), layer(4), layer(8, **slower), layer(16, **slower)) == {1024: 4}
        assert self.rows(*(layer(tokens, **slower) for tokens in TOKEN_BUCKETS)) == {1024: 0}

    def test_no_bucket_behind_a_slower_one_counts(self) -> None:
        assert self.rows(layer(1), layer(2), layer(4, separate=9), layer(8), layer(16)) == {1024: 2}

    def test_a_bucket_that_was_not_measured_ends_it(self) -> None:
        assert self.rows(layer(1), layer(2), layer(8)) == {1024: 2}
        assert self.rows(layer(2), layer(4)) == {}

    def test_the_sum_of_all_four_counts_and_the_head_does_not(self) -> None:
        mixed = [*layer(1)[:3], times("down", separate=7)]
        assert self.rows(mixed, [times("head", separate=1)]) == {1024: 1}
        assert self.rows([*layer(1)[:3], times("down", separate=4)]) == {1024: 0}
        assert self.rows([*layer(1)[:3], times("down", separate=3.9)]) == {1024: 0}
        assert self.rows([*layer(1)[:3], times("down", separate=4.1)]) == {1024: 1}

    def test_a_layer_without_one_of_its_linears_says_nothing(self) -> None:
        assert self.rows(layer(1)[:3], [times("head")]) == {}

    def test_forms_that_are_not_kept_do_not_count(self) -> None:
        assert self.rows(layer(1, best=9.9, separate=9.95)) == {1024: 0}
        assert self.rows(layer(1, best=9.7, separate=9.95)) == {1024: 1}

    def test_of_two_models_of_one_size_the_lesser_decides(self) -> None:
        other = [replace(each, model="another") for tokens in (1, 2) for each in layer(tokens)]
        assert self.rows(other, *(layer(tokens) for tokens in TOKEN_BUCKETS)) == {1024: 2}
        assert self.rows(*(layer(tokens) for tokens in TOKEN_BUCKETS), other) == {1024: 2}


class TestShapes:
    def test_the_layers_of_a_shipped_model(self) -> None:
        assert layers_of("Qwen3-0.6B") == [
            Shape("Qwen3-0.6B", "qkv", 1024, 4096, normed=True),
            Shape("Qwen3-0.6B", "o", 2048, 1024, residual=True),
            Shape("Qwen3-0.6B", "gate_up", 1024, 6144, normed=True, gated=True),
            Shape("Qwen3-0.6B", "down", 3072, 1024, residual=True),
            Shape("Qwen3-0.6B", "head", 1024, 151936),
        ]
        assert [shape.part for shape in layers_of("Llama-3.2-1B")] == [*LAYER_PARTS, "head"]

    @pytest.mark.parametrize("shared_memory", [64 * 1024, 99 * 1024, 227 * 1024])
    def test_whatever_wins_may_stand_in_a_table_and_runs(self, shared_memory: int) -> None:
        for shape in (shape for model in shipped_shapes() for shape in layers_of(model)):
            for tokens in TOKEN_BUCKETS:
                key = LinearKey(shape.columns, shape.rows, shape.gated, shape.normed, tokens)
                rules = choose_form(
                    UNTUNED, tokens, shape.columns, shape.rows, 2, shape.gated, shape.normed, shared_memory
                )
                forms = candidates(shape, tokens, shared_memory)
                assert forms
                for form in (*forms, rules):
                    made = Tuning("a GPU", "2026-01-02", VERSIONS, {key: form}, {})
                    read = read_json(as_json(made), "made")
                    assert form == choose_form(
                        read, tokens, shape.columns, shape.rows, 2, shape.gated, shape.normed, shared_memory
                    )


class TestCommand:
    @pytest.fixture(autouse=True)
    def _a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--tokens", "1,two"), "--tokens '1,two' must be numbers"),
            (("--tokens", "17"), "--tokens has 17, which must be one of 1, 2, 3"),
            (("--tokens", "3", "--tune", "--write", "x"), "--tokens has 3, which must be one of 1, 2, 4, 8, 16"),
            (("--models", "Qwen9"), "--models has 'Qwen9': the shapes are Llama-3.1-70B"),
            (("--only", "nobody"), "--only 'nobody' is in no layer's name"),
            (("--write", "x"), "--write needs --tune"),
            (("--tune", "--write", "no/such/folder/x"), "--write 'no/such/folder/x' is no file in a folder"),
            (("--tune", "--write", "."), "--write '.' is no file"),
        ],
    )
    def test_refusals_before_anything_is_measured(self, arguments, message: str, monkeypatch, capsys) -> None:
        monkeypatch.setattr(linears, "run", lambda *_: pytest.fail("measured"))
        with pytest.raises(SystemExit) as left:
            linears.main(arguments)
        assert left.value.code == 2
        assert re.search(f"error: {re.escape(message)}", capsys.readouterr().err)

    def test_the_table_is_written(self, monkeypatch, tmp_path: Path, capsys) -> None:
        asked = []

        def run(shapes: list[Shape], tokens: list[int], tuning: bool) -> list[LinearTimes]:
            asked.append(([shape.name for shape in shapes], tokens, tuning))
            return [*layer(1, best=9), *layer(2)]

        monkeypatch.setattr(linears, "run", run)
        file = tmp_path / "mine.json"
        linears.main(["--tune", "--write", str(file), "--tokens", "1,2", "--models", "Qwen3-0.6B", "--only", "o"])
        assert asked == [(["Qwen3-0.6B o", "Qwen3-0.6B down"], [1, 2], True)]
        read = read_json(file.read_text(), str(file))
        assert read.gpu == "a GPU"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", read.date)
        assert read.versions == {"torch": torch.__version__, "triton": linears.triton.__version__}
        assert len(read.linears) == 4
        assert read.fused_rows == {1024: 2}
        assert "4 forms and 1 hidden sizes are in" in capsys.readouterr().out

    def test_tuning_times_what_is_right_and_names_the_fastest(self, monkeypatch, capsys) -> None:
        class Pretend:
            """Forms take as long as they have rows a tile; the one with 16 is wrong, the one with 128 too large."""

            shape = Shape("a model", "qkv", 1024, 4096, normed=True)
            x = torch.zeros(8, 1024)
            key = LinearKey(1024, 4096, False, True, 8)

            def error(self, form: Form) -> float:
                if form.block_n == 128:
                    raise RuntimeError("out of resource")
                return 0.5 if form.block_n == 16 and form.kind == "looped" else 1e-3

            def call(self, weight: torch.Tensor, form: Form) -> None:
                raise NotImplementedError

            def separately(self, weight: torch.Tensor) -> None:
                raise NotImplementedError

            def microseconds(self, call: Any) -> float:
                if call == self.separately:
                    return 77.0
                form = call.keywords["form"]
                return float(form.block_n * (2 if form.kind == "one_shot" else 1) + form.num_warps / 10)

        monkeypatch.setattr(linears, "shared_memory_limit", lambda device: 227 * 1024)
        found = linears.tune(Pretend())
        assert found.rules == choose_form(UNTUNED, 8, 1024, 4096, 2, False, True, 227 * 1024)
        assert found.best == Form("looped", 32, 128, 2, split=1, num_stages=5)
        assert (found.rules_us, found.best_us, found.separate_us) == (32.4, 32.2, 77.0)
        printed = capsys.readouterr().out
        assert "RuntimeError" in printed
        assert "the rules' choice stays" in printed
