"""Tuning tables: what is read, what is refused in which words, which table decides, and what the shipped one says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tritonllm
from tritonllm import EngineConfig
from tritonllm.engine.cuda_graphs import bucket_sizes
from tritonllm.engine.resolve import resolve_model
from tritonllm.errors import ConfigError, KernelError
from tritonllm.kernels import tuning
from tritonllm.kernels.skinny_form import Form, gemv
from tritonllm.kernels.skinny_linear import MAX_ROWS, plan_skinny_linear
from tritonllm.kernels.skinny_table import choose_form
from tritonllm.kernels.tuning_file import as_json, read_json
from tritonllm.kernels.tuning_table import PATHS, TOKEN_BUCKETS, UNTUNED, LinearKey, PathLimit, Tuning
from tritonllm.models.decode_path import DecodePath

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HOPPER = 227 * 1024
TABLES = sorted((Path(tritonllm.__file__).parent / "kernels" / "tuned").glob("*.json"))
LOOPED = Form("looped", 32, 64, 4, split=2, num_stages=3)
DIRECT = Form("direct", 32, 128, 8, split=8, num_stages=2)
VERSIONS = {"torch": "2.11.0", "triton": "3.6.0"}

# What the table of Hopper was when it stood in the code: it was asked unless a norm of long rows was fused.
ONE_TOKEN = {
    (1024, 4096): gemv(256, 4, 2),
    (2048, 1024): gemv(256, 6, 2),
    (1024, 6144): gemv(256, 4, 2),
    (3072, 1024): gemv(256, 4, 4),
    (1024, 151936): gemv(256, 8, 4),
    (4096, 6144): gemv(256, 4, 4),
    (12288, 4096): gemv(4096, 1, 8),
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables are read once in a process, here once in a test. A device of type cuda counts as an H200."""
    caches = (tuning._tuning, tuning.shipped_tuning, tuning.named_tuning)
    monkeypatch.delenv("TRITONLLM_TUNING", raising=False)
    monkeypatch.setattr(tuning, "nvidia_capability", lambda device: (9, 0) if device.type == "cuda" else (0, 0))
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def paths(*limits: tuple[int, str]) -> tuple[PathLimit, ...]:
    return tuple(PathLimit(*limit) for limit in limits)


def table(
    linears: dict[LinearKey, Form] | None = None, decode_paths: dict[int, tuple[PathLimit, ...]] | None = None
) -> Tuning:
    return Tuning("a GPU", "2026-01-02", VERSIONS, linears or {}, decode_paths or {})


def named(used: Tuning, hidden_size: int, *rows: int) -> list[str]:
    return [used.path(count, hidden_size) for count in rows]


def choice(used: Tuning, tokens: int, columns: int = 1024, rows: int = 4096, **fused: Any) -> Form:
    shared_memory, itemsize = fused.pop("shared_memory", HOPPER), fused.pop("itemsize", 2)
    flags = {"gated": False, "normed": False} | fused
    return choose_form(used, tokens, columns, rows, itemsize, flags["gated"], flags["normed"], shared_memory)


class TestLookUp:
    def test_an_entry_serves_its_bucket_and_no_other(self) -> None:
        for bucket in TOKEN_BUCKETS:
            form = gemv(512, 4, 4) if bucket == 1 else LOOPED
            used = table({LinearKey(1024, 4096, False, False, bucket): form})
            served = [tokens for tokens in range(1, MAX_ROWS + 1) if used.form(tokens, 1024, 4096, False, False)]
            assert served == list(range(bucket // 2 + 1, bucket + 1))
            assert all(choice(used, tokens) == form for tokens in served)
            assert all(
                choice(used, tokens) == choice(UNTUNED, tokens)
                for tokens in range(1, MAX_ROWS + 1)
                if tokens not in served
            )

    @pytest.mark.parametrize(
        "other", [{"columns": 1025}, {"rows": 4098}, {"gated": True}, {"normed": True}, {"itemsize": 4}]
    )
    def test_another_layer_goes_by_the_rules(self, other: dict[str, Any]) -> None:
        used = table({LinearKey(1024, 4096, False, False, 4): LOOPED})
        assert choice(used, 3) == LOOPED
        assert choice(used, 3, **other) == choice(UNTUNED, 3, **other) != LOOPED

    @pytest.mark.parametrize(("gated", "shared_memory"), [(False, 36863), (True, 61439)])
    def test_a_form_that_does_not_fit_is_an_error_that_names_it(self, gated: bool, shared_memory: int) -> None:
        used = table({LinearKey(1024, 4096, gated, False, 16): LOOPED})
        taken = LOOPED.num_stages * LOOPED.split * LOOPED.block_k * 2 * (LOOPED.block_n * (1 + gated) + 16)
        assert taken == shared_memory + 1
        assert choice(used, 16, gated=gated, shared_memory=taken) == LOOPED
        with pytest.raises(KernelError, match=rf"{LOOPED.kind}.* for 16 tokens, 1024 columns.* {shared_memory} bytes"):
            choice(used, 16, gated=gated, shared_memory=shared_memory)

    @pytest.mark.parametrize(
        ("form", "taken"), [(DIRECT, 32 * 1024), (Form("direct", 64, 64, 16, split=16), 64 * 1024)]
    )
    def test_direct_takes_the_parts_of_its_sums_or_a_step_of_x(self, form: Form, taken: int) -> None:
        """Whichever is more: neither a weight nor all of x is in shared memory."""
        used = table({LinearKey(8192, 1024, False, False, 16): form})
        assert taken == 16 * max(4 * form.split * form.block_n, 2 * form.split * form.block_k)
        assert choice(used, 16, 8192, 1024, shared_memory=taken) == form
        with pytest.raises(KernelError, match=f"does not fit the {taken - 1} bytes"):
            choice(used, 16, 8192, 1024, shared_memory=taken - 1)

    def test_a_path_serves_up_to_its_rows_and_separate_all_above(self) -> None:
        used = table(decode_paths={1024: paths((2, "skinny"), (16, "separate"), (64, "hopper"))})
        expected = ["skinny"] * 2 + ["separate"] * 2 + ["hopper"] * 2 + ["separate"]
        assert named(used, 1024, 1, 2, 3, 16, 17, 64, 65) == expected
        assert named(table(decode_paths={1024: ()}), 1024, 1, 256) == ["separate"] * 2

    def test_the_next_larger_size_that_was_measured_decides_and_the_largest_above_all(self) -> None:
        used = table(decode_paths={4096: paths((2, "skinny")), 1024: paths((16, "skinny"))})
        assert [used.path(16, size) for size in (64, 1024, 1025, 4096, 4097)] == ["skinny"] * 2 + ["separate"] * 3
        assert [used.path(2, size) for size in (1025, 4096, 16384)] == ["skinny"] * 3
        assert used.path(3, 16384) == "separate"

    @pytest.mark.parametrize(("hidden_size", "most"), [(64, 8), (1024, 8), (1025, 1), (2048, 1), (16384, 1)])
    def test_few_rows_are_skinny_where_nothing_was_measured(self, hidden_size: int, most: int) -> None:
        assert named(UNTUNED, hidden_size, 1, most, most + 1, 16, 256) == ["skinny"] * 2 + ["separate"] * 3
        only_linears = table({LinearKey(1024, 4096, False, False, 4): LOOPED})
        assert named(only_linears, hidden_size, most, most + 1) == ["skinny", "separate"]

    def test_the_names_are_those_of_the_paths(self) -> None:
        assert tuple(path.value for path in DecodePath) == PATHS


class TestFile:
    LINEARS = {
        LinearKey(2048, 1024, True, True, 16): LOOPED,
        LinearKey(2048, 1024, False, False, 8): DIRECT,
        LinearKey(1024, 151936, False, False, 1): gemv(256, 8, 4),
    }

    PATHS = {4096: (), 1024: paths((2, "skinny"), (16, "separate"), (256, "hopper"))}

    def test_what_is_written_is_read(self) -> None:
        written = table(self.LINEARS, self.PATHS)
        text = as_json(written)
        read = read_json(text, "a file")
        assert (read.gpu, read.date, read.versions) == (written.gpu, written.date, written.versions)
        assert (read.linears, read.decode_paths) == (written.linears, written.decode_paths)
        assert as_json(read) == text
        assert as_json(read_json(as_json(table()), "a file")) == as_json(table())
        assert set(json.loads(text)["linears"][0]) == {"columns", "rows", "gated", "normed", "tokens", "form"}

    @pytest.mark.parametrize(
        ("place", "value", "message"),
        [
            (("gpu",), None, "gpu is None and must be a non-empty string"),
            (("date",), "", "date is  and must be a non-empty string"),
            (("versions",), {"torch": "2"}, "versions is .* and must be an object with triton"),
            (("linears",), {}, r"linears is \{\} and must be a list"),
            (("linears", 0), 3, r"linears\[0\] is 3 and must be a JSON object"),
            (("linears", 1, "rows"), 0, r"linears\[1\].rows is 0 and must be an integer >= 1"),
            (("linears", 1, "rows"), True, r"linears\[1\].rows is True"),
            (("linears", 2, "rows"), 1023, r"linears\[2\].rows is 1023 and must be even"),
            (("linears", 0, "gated"), 1, r"linears\[0\].gated is 1 and must be true or false"),
            (("linears", 1, "tokens"), 3, r"linears\[1\].tokens is 3 and must be one of 1, 2, 4, 8, 16"),
            (("linears", 0, "tokens"), 2, r"linears\[0\].tokens is 2 and must be 1, which is all that gemv"),
            (("linears", 0, "colums"), 2, r"linears\[0\] is .* and must be an object without colums"),
            (("linears", 0, "form", "kind"), "gemm", r"form.kind is gemm and must be one of gemv, direct, looped"),
            (("linears", 0, "form", "block_k"), 96, r"linears\[0\].form.block_k is 96 and must be a power of two"),
            (("linears", 2, "form", "block_n"), 24, "block_n is 24 and must be a power of two"),
            (("linears", 2, "form", "block_k"), 8, "block_k is 8 and must be an integer >= 16"),
            (("linears", 2, "form", "num_warps"), 64, "num_warps is 64 and must be an integer >= 1 and <= 32"),
            (("linears", 2, "form", "num_warps"), 4.0, "num_warps is 4.0 and must be an integer"),
            (("linears", 2, "form", "tiles"), 2, "tiles is 2 and must be 1"),
            (("linears", 0, "form", "num_stages"), 2, "num_stages is 2 and must be 1"),
            (("linears", 1, "form", "num_stages"), 0, "num_stages is 0 and must be an integer >= 1"),
            (("linears", 1, "form", "block_k"), 16, "block_k is 16 and must be an integer >= 32"),
            (("linears", 1, "form", "split"), 1, "split is 1 and must be an integer >= 2"),
            (("decode_paths",), None, "decode_paths is None and must be a list"),
            (("decode_paths", 0), 4, r"decode_paths\[0\] is 4 and must be a JSON object"),
            (("decode_paths", 0, "hidden_size"), 0, r"decode_paths\[0\].hidden_size is 0 and must be an integer >= 1"),
            (("decode_paths", 1, "hidden_size"), 1024, r"decode_paths\[1\].hidden_size is 1024 and must be there only"),
            (("decode_paths", 0, "rows"), 4, r"decode_paths\[0\] is .* and must be an object without rows"),
            (("decode_paths", 0, "paths"), {}, r"decode_paths\[0\].paths is \{\} and must be a list"),
            (("decode_paths", 0, "paths", 1), "hopper", r"paths\[1\] is hopper and must be a JSON object"),
            (("decode_paths", 0, "paths", 1), {"rows": 9}, r"paths\[1\] is .* and must be an object with path"),
            (
                ("decode_paths", 0, "paths", 2, "path"),
                "fast",
                "is fast and must be one of skinny, hopper, mixed, separate",
            ),
            (("decode_paths", 0, "paths", 2, "path"), ["skinny"], "must be one of skinny, hopper, mixed, separate"),
            (("decode_paths", 0, "paths", 0, "rows"), 0, r"paths\[0\].rows is 0 and must be an integer >= 1 and <= 16"),
            (("decode_paths", 0, "paths", 0, "rows"), 17, r"rows is 17 and must be an integer >= 1 and <= 16"),
            (
                ("decode_paths", 0, "paths", 1, "rows"),
                2,
                r"paths\[1\].rows is 2 and must be above the 2 rows before it",
            ),
            (("decode_paths", 0, "paths", 2, "rows"), 16.5, r"paths\[2\].rows is 16.5 and must be an integer >= 1"),
            (("decode_paths", 0, "paths", 2, "path"), "skinny", r"paths\[2\].rows is 256 and must be .* <= 16"),
        ],
    )
    def test_a_wrong_value_is_named_with_its_place(self, place: tuple, value: Any, message: str) -> None:
        content = json.loads(as_json(table(self.LINEARS, self.PATHS)))
        holder = content
        for step in place[:-1]:
            holder = holder[step]
        holder[place[-1]] = value
        with pytest.raises(ConfigError, match=rf"The tuning table here.json is wrong: .*{message}"):
            read_json(json.dumps(content), "here.json")

    @pytest.mark.parametrize("name", ["gpu", "date", "versions", "linears", "decode_paths"])
    def test_a_missing_key_is_named(self, name: str) -> None:
        content = json.loads(as_json(table()))
        del content[name]
        with pytest.raises(ConfigError, match=f"it is .* and must be an object with {name}"):
            read_json(json.dumps(content), "here.json")

    def test_an_entry_twice(self) -> None:
        content = json.loads(as_json(table(self.LINEARS)))
        content["linears"].append(content["linears"][0])
        with pytest.raises(ConfigError, match=r"linears\[3\] is .* and must be there only once"):
            read_json(json.dumps(content), "here.json")

    @pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"gpu": }'])
    def test_no_json(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"The tuning table here.json is not JSON: "):
            read_json(text, "here.json")


class TestWhichTableDecides:
    KEY = LinearKey(1024, 4096, False, False, 1)

    def name(self, monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> str:
        file = folder / "mine.json"
        file.write_text(text)
        monkeypatch.setenv("TRITONLLM_TUNING", str(file))
        return str(file)

    def test_the_shipped_one_of_the_gpu_and_none_elsewhere(self) -> None:
        assert tuning.tuning_of(GPU) is tuning.shipped_tuning((9, 0))
        assert tuning.tuning_of(GPU).linears
        assert tuning.tuning_of(CPU) is tuning.shipped_tuning((12, 0)) is UNTUNED

    def test_the_named_one_goes_first(self, monkeypatch, tmp_path) -> None:
        fresh = LinearKey(576, 960, False, True, 2)
        mine = table({self.KEY: gemv(512, 4, 4), fresh: LOOPED}, {1024: paths((8, "skinny"))})
        self.name(monkeypatch, tmp_path, as_json(mine))
        used, shipped = tuning.tuning_of(GPU), tuning.shipped_tuning((9, 0))
        assert used.gpu == mine.gpu
        assert used.linears == shipped.linears | mine.linears
        assert choice(used, 1) == gemv(512, 4, 4) != choice(shipped, 1)
        assert choice(used, 1, 12288, 4096) == choice(shipped, 1, 12288, 4096)
        assert named(used, 1024, 8, 9) == ["skinny", "separate"] != named(shipped, 1024, 8, 9)
        for size in (2048, 8192):
            assert named(used, size, *range(1, 300)) == named(shipped, size, *range(1, 300))
        assert tuning.tuning_of(CPU).linears == mine.linears

    def test_a_plan_asks_the_table_of_its_device(self, monkeypatch, tmp_path) -> None:
        x, weight, out = (
            torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((1, 64), (32, 64), (1, 32))
        )
        form = gemv(64, 2, 4)
        assert plan_skinny_linear(x, weight, out).options["num_warps"] == 2
        mine = table({LinearKey(64, 32, False, False, 1): form})
        assert plan_skinny_linear(x, weight, out, tuning=mine) == plan_skinny_linear(x, weight, out, form=form)
        self.name(monkeypatch, tmp_path, as_json(mine))
        tuning.named_tuning.cache_clear()
        tuning._tuning.cache_clear()
        assert plan_skinny_linear(x, weight, out) == plan_skinny_linear(x, weight, out, form=form)

    @pytest.mark.parametrize("text", [None, "{", "{}"])
    def test_a_wrong_one_stops_the_engine_before_anything_is_looked_up(self, text, monkeypatch, tmp_path) -> None:
        if text is None:
            path = str(tmp_path / "absent.json")
            monkeypatch.setenv("TRITONLLM_TUNING", path)
        else:
            path = self.name(monkeypatch, tmp_path, text)
        with pytest.raises(ConfigError, match=path) as caught:
            resolve_model(EngineConfig("no/such-model"))
        assert str(caught.value).count("\n") == 0

    def test_an_empty_name_is_none(self, monkeypatch) -> None:
        monkeypatch.setenv("TRITONLLM_TUNING", "")
        assert tuning.named_tuning() is None

    def test_a_folder_is_no_table(self, monkeypatch, tmp_path) -> None:
        monkeypatch.setenv("TRITONLLM_TUNING", str(tmp_path))
        with pytest.raises(ConfigError, match="cannot be read .*: give a file that"):
            tuning.tuning_of(CPU)


class TestShipped:
    def test_hopper_has_one(self) -> None:
        assert "sm_90.json" in [file.name for file in TABLES]

    @pytest.mark.parametrize("file", TABLES, ids=lambda file: file.stem)
    def test_it_is_read_and_written_as_it_stands(self, file: Path) -> None:
        text = file.read_text()
        assert as_json(read_json(text, file.name)) == text

    def test_every_form_of_hopper_fits_it(self) -> None:
        shipped = tuning.shipped_tuning((9, 0))
        for key, form in shipped.linears.items():
            fused = {"gated": key.gated, "normed": key.normed}
            assert choice(shipped, key.tokens, key.columns, key.rows, **fused) == form

    @pytest.mark.parametrize("shape", ONE_TOKEN)
    @pytest.mark.parametrize("gated", [False, True])
    def test_one_token_takes_the_forms_that_were_measured(self, shape: tuple[int, int], gated: bool) -> None:
        shipped = tuning.shipped_tuning((9, 0))
        assert choice(shipped, 1, *shape, gated=gated) == ONE_TOKEN[shape]
        normed = ONE_TOKEN[shape] if shape[0] <= 1024 else choice(UNTUNED, 1, *shape, gated=gated, normed=True)
        assert choice(shipped, 1, *shape, gated=gated, normed=True) == normed
        assert LinearKey(*shape, gated, False, 1) in shipped.linears

    def test_several_tokens_go_direct_where_qwen3_and_llama_need_them(self) -> None:
        """But for Llama's gate and up of more than 8, which stream 64 MiB."""
        shipped, kinds = tuning.shipped_tuning((9, 0)), {}
        for columns, rows in ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (2048, 3072), (2048, 16384)):
            fused = {"gated": rows in (6144, 16384), "normed": rows > 1024}
            kinds |= {(rows, tokens): choice(shipped, tokens, columns, rows, **fused).kind for tokens in (2, 8, 9, 16)}
        assert {key for key, kind in kinds.items() if kind != "direct"} == {(16384, 9), (16384, 16)}

    def test_the_paths_of_an_h200(self) -> None:
        shipped = tuning.shipped_tuning((9, 0))
        for size in (576, 1024):
            assert named(shipped, size, 1, 8, 9, 256, 257) == ["skinny"] * 2 + ["hopper"] * 2 + ["separate"]
        middle = ["skinny"] * 2 + ["hopper"] * 2 + ["separate"] * 2 + ["mixed"] * 2 + ["separate"]
        assert named(shipped, 2048, 1, 4, 5, 128, 129, 160, 161, 256, 257) == middle
        large = ["skinny"] + ["hopper"] * 2 + ["separate"] * 2 + ["mixed"] * 2 + ["separate"] * 2 + ["mixed"] * 2
        for size in (4096, 8192):
            assert named(shipped, size, 1, 2, 64, 65, 80, 81, 128, 129, 176, 177, 256) == large
            assert named(shipped, size, 257) == ["separate"]

    def test_it_goes_into_the_wheel(self) -> None:
        project = Path(tritonllm.__file__).parents[2] / "pyproject.toml"
        assert '"kernels/tuned/*.json"' in project.read_text()


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7, 9, 12, 16, 17, 40])
def test_capturing_the_decode_graphs_meets_every_bucket_of_tokens(limit: int) -> None:
    """A form is chosen for each bucket, and whatever serves a batch within the limit must be compiled at the start."""

    def buckets(sizes: Any) -> set[int]:
        return {min(bucket for bucket in TOKEN_BUCKETS if bucket >= size) for size in sizes if size <= MAX_ROWS}

    assert buckets(bucket_sizes(limit)) == buckets(range(1, limit + 1))
