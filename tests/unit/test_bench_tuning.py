"""The benches `linears` and `decode_layer`: from made-up times to a tuning table, and what the commands refuse."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton

from tritonllm.bench import decode_layer, linears
from tritonllm.bench.linear_layers import Shape, candidates, layers_of
from tritonllm.bench.target import shipped_shapes
from tritonllm.bench.tuning import LinearTimes, best_forms, best_paths
from tritonllm.kernels.skinny_form import Form, gemv
from tritonllm.kernels.skinny_table import choose_form
from tritonllm.kernels.tuning_file import as_json, read_json
from tritonllm.kernels.tuning_table import TOKEN_BUCKETS, UNTUNED, LinearKey, PathLimit, Tuning

VERSIONS = {"torch": "2.11.0", "triton": "3.6.0"}
RULES, FASTER = Form("looped", 32, 64, 4), Form("looped", 16, 64, 4, split=4)


def times(tokens: int = 1, rules: float = 10, best: float = 10) -> LinearTimes:
    """The fastest form is another than the rules' where its time is."""
    key = LinearKey(1024, 4096, False, True, tokens)
    return LinearTimes(key, RULES, rules, RULES if best == rules else FASTER, best)


class TestForms:
    @pytest.mark.parametrize(("best", "kept"), [(9.79, True), (9.81, False), (10, False), (11, False)])
    def test_only_more_than_two_percent_is_kept(self, best: float, kept: bool) -> None:
        assert best_forms([times(best=best)]) == ({times().key: FASTER} if kept else {})

    def test_the_rules_choice_never_beats_itself(self) -> None:
        """It is timed twice where it is the fastest."""
        assert best_forms([replace(times(best=5), best=RULES)]) == {}

    def test_each_bucket_is_an_entry_of_its_own(self) -> None:
        found = [times(tokens=tokens, best=9 if tokens in (2, 8) else 10) for tokens in TOKEN_BUCKETS]
        assert [key.tokens for key in best_forms(found)] == [2, 8]

    def test_of_two_layers_with_one_key_the_larger_gain_decides(self) -> None:
        found = [times(best=8), replace(times(best=9), best=gemv(256, 4, 4))]
        assert best_forms(found) == best_forms(found[::-1]) == {times().key: FASTER}


class TestPaths:
    def limits(self, times: dict[int, dict[str, float]]) -> list[tuple[int, str]]:
        return [tuple(limit) for limit in best_paths(times)]

    def test_neighbours_with_one_path_are_one_limit(self) -> None:
        few, many = {"skinny": 5, "hopper": 8, "separate": 9}, {"hopper": 8, "separate": 9}
        assert self.limits({1: few, 2: few, 64: many, 128: many}) == [(2, "skinny"), (128, "hopper")]

    def test_batches_may_come_in_any_order(self) -> None:
        times = {64: {"hopper": 8, "separate": 9}, 1: {"skinny": 5, "hopper": 8, "separate": 9}}
        assert self.limits(times) == [(1, "skinny"), (64, "hopper")]

    def test_separate_in_between_is_a_limit_and_above_all_goes_without_saying(self) -> None:
        fast = {"hopper": 8, "separate": 9}
        slow = {"hopper": 9, "separate": 8}
        assert self.limits({1: slow, 16: slow, 32: fast, 64: slow, 128: slow}) == [(16, "separate"), (32, "hopper")]
        assert self.limits({1: slow, 2: slow}) == []
        assert best_paths({}) == ()

    @pytest.mark.parametrize(("hopper", "changes"), [(9.89, True), (9.91, False), (10, False)])
    def test_only_more_than_one_percent_changes_the_path(self, hopper: float, changes: bool) -> None:
        times = {1: {"skinny": 5, "hopper": 6, "separate": 9}, 2: {"skinny": 10, "hopper": hopper, "separate": 11}}
        assert self.limits(times) == ([(1, "skinny"), (2, "hopper")] if changes else [(2, "skinny")])

    def test_what_displaced_a_path_has_to_be_displaced_itself(self) -> None:
        times = {
            1: {"hopper": 8, "separate": 9},
            2: {"hopper": 10, "separate": 9},
            4: {"hopper": 10, "separate": 10.05},
            8: {"hopper": 9, "separate": 10},
        }
        assert self.limits(times) == [(1, "hopper"), (4, "separate"), (8, "hopper")]

    def test_the_smallest_batch_has_no_path_before_it(self) -> None:
        assert self.limits({1: {"skinny": 9.99, "hopper": 10, "separate": 10}}) == [(1, "skinny")]

    def test_a_path_that_cannot_run_gives_way_to_the_fastest(self) -> None:
        times = {16: {"skinny": 5, "separate": 9}, 17: {"hopper": 8.99, "separate": 9}}
        assert self.limits(times) == [(16, "skinny"), (17, "hopper")]

    def test_what_comes_out_may_stand_in_a_table(self) -> None:
        times = {rows: {"skinny": 1, "hopper": 2, "separate": 3} for rows in (1, 16)}
        times |= {rows: {"hopper": 2, "separate": 3} for rows in (32, 256)}
        made = Tuning("a GPU", "2026-01-02", VERSIONS, {}, {1024: best_paths(times)})
        assert read_json(as_json(made), "made").decode_paths == made.decode_paths


class TestShapes:
    def test_the_layers_of_a_shipped_model(self) -> None:
        assert layers_of("Qwen3-0.6B") == [
            Shape("Qwen3-0.6B", "qkv", 1024, 4096, normed=True),
            Shape("Qwen3-0.6B", "o", 2048, 1024, residual=True),
            Shape("Qwen3-0.6B", "gate_up", 1024, 6144, normed=True, gated=True),
            Shape("Qwen3-0.6B", "down", 3072, 1024, residual=True),
            Shape("Qwen3-0.6B", "head", 1024, 151936),
        ]
        assert [shape.part for shape in layers_of("Llama-3.2-1B")] == ["qkv", "o", "gate_up", "down", "head"]

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


@pytest.fixture
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """A table that somebody measured before."""
    file = tmp_path / "mine.json"
    linears = {LinearKey(576, 960, False, False, 1): gemv(256, 4, 4)}
    decode_paths = {512: (PathLimit(4, "skinny"),), 1024: (PathLimit(8, "skinny"),)}
    file.write_text(as_json(Tuning("a GPU", "2026-01-02", VERSIONS, linears, decode_paths)))
    return file


def refusal(bench: ModuleType, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        bench.main(arguments)
    assert left.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2]


WRITING = [pytest.param(linears, ["--tune"], id="linears"), pytest.param(decode_layer, [], id="decode_layer")]


@pytest.mark.usefixtures("_a_gpu")
@pytest.mark.parametrize(("bench", "options"), WRITING)
class TestFile:
    """What both benches do about the file of --write before anything is measured."""

    @pytest.fixture(autouse=True)
    def _nothing_is_measured(self, monkeypatch: pytest.MonkeyPatch, bench: ModuleType) -> None:
        monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("measured"))

    @pytest.mark.parametrize("path", ["no/such/folder/x", "."])
    def test_a_place_that_cannot_be_written(self, bench, options, path: str, capsys) -> None:
        assert refusal(bench, [*options, "--write", path], capsys).startswith(
            f"--write {path!r} is no file in a folder"
        )

    @pytest.mark.parametrize(("text", "reason"), [("{", "is not JSON"), ("{}", "is wrong: it is {}")])
    def test_a_file_that_is_no_table(self, bench, options, before: Path, text: str, reason: str, capsys) -> None:
        before.write_text(text)
        told = refusal(bench, [*options, "--write", str(before)], capsys)
        assert told.startswith(f"--write {str(before)!r} is there and cannot be kept: ")
        assert reason in told
        assert before.read_text() == text

    def test_a_table_of_another_gpu(self, bench, options, before: Path, monkeypatch, capsys) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another GPU")
        told = refusal(bench, [*options, "--write", str(before)], capsys)
        assert "is a table of 'a GPU' and this is 'another GPU': give another file" in told

    def test_no_gpu(self, bench, options, before: Path, monkeypatch, capsys) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit) as left:
            bench.main([*options, "--write", str(before)])
        assert left.value.code == 1
        assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.usefixtures("_a_gpu")
class TestLinears:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--tokens", "1,two"), "--tokens '1,two' must be numbers"),
            (("--tokens", "17"), "--tokens has 17, which must be one of 1, 2, 3"),
            (("--tokens", "3", "--tune", "--write", "x"), "--tokens has 3, which must be one of 1, 2, 4, 8, 16"),
            (("--models", "Qwen9"), "--models has 'Qwen9': the shapes are Llama-3.1-70B"),
            (("--only", "nobody"), "--only 'nobody' is in no layer's name"),
            (("--write", "x"), "--write needs --tune"),
        ],
    )
    def test_refusals_before_anything_is_measured(self, arguments, message: str, monkeypatch, capsys) -> None:
        monkeypatch.setattr(linears, "run", lambda *_: pytest.fail("measured"))
        assert refusal(linears, arguments, capsys).startswith(message)

    def test_the_table_is_written(self, monkeypatch, tmp_path: Path, capsys) -> None:
        asked = []

        def run(shapes: list[Shape], tokens: list[int], tuning: bool) -> list[LinearTimes]:
            asked.append(([shape.name for shape in shapes], tokens, tuning))
            return [times(1, best=9), times(2)]

        monkeypatch.setattr(linears, "run", run)
        file = tmp_path / "mine.json"
        linears.main(["--tune", "--write", str(file), "--tokens", "1,2", "--models", "Qwen3-0.6B", "--only", "o"])
        assert asked == [(["Qwen3-0.6B o", "Qwen3-0.6B down"], [1, 2], True)]
        read = read_json(file.read_text(), str(file))
        assert read.gpu == "a GPU"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", read.date)
        assert read.versions == {"torch": torch.__version__, "triton": triton.__version__}
        assert (read.linears, read.decode_paths) == ({times(1).key: FASTER}, {})
        assert f"1 forms and paths of 0 hidden sizes are in {file}" in capsys.readouterr().out

    def test_paths_that_are_there_are_kept_and_forms_are_not(self, monkeypatch, before: Path) -> None:
        paths = read_json(before.read_text(), "before").decode_paths
        monkeypatch.setattr(linears, "run", lambda *_: [times(1, best=9)])
        linears.main(["--tune", "--write", str(before)])
        read = read_json(before.read_text(), "after")
        assert (read.linears, read.decode_paths) == ({times(1).key: FASTER}, paths)
        assert read.date != "2026-01-02"

    def test_tuning_times_what_is_right_and_names_the_fastest(self, monkeypatch, capsys) -> None:
        class Pretend:
            """Forms take as long as their rows, 32 at least; looped ones of 16 are wrong, one of 128 is too large."""

            shape = Shape("a model", "qkv", 1024, 4096, normed=True)
            x = torch.zeros(8, 1024)
            key = LinearKey(1024, 4096, False, True, 8)

            def error(self, form: Form) -> float:
                if form.block_n == 128:
                    raise RuntimeError("out of resource")
                return 0.5 if form.block_n == 16 and form.kind == "looped" else 1e-3

            def call(self, weight: torch.Tensor, form: Form) -> None:
                raise NotImplementedError

            def microseconds(self, call: Any) -> float:
                form = call.keywords["form"]
                return float(max(form.block_n, 32) + form.num_warps / 10)

        monkeypatch.setattr(linears, "shared_memory_limit", lambda device: 227 * 1024)
        found = linears.tune(Pretend())
        assert found.rules == choose_form(UNTUNED, 8, 1024, 4096, 2, False, True, 227 * 1024)
        assert found.best == Form("looped", 32, 128, 2, split=1, num_stages=5)
        assert (found.rules_us, found.best_us) == (32.4, 32.2)
        printed = capsys.readouterr().out
        assert "RuntimeError" in printed
        assert "the rules' choice stays" in printed
