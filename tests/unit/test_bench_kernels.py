"""`tritonllm kernels bench` as far as it goes without a GPU: rows, floors, bars, table, JSON, plot and refusals.

The ops run as their references, and times come from a made-up clock.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tritonllm import kernels
from tritonllm.bench.graph_timing import ROTATED_BYTES
from tritonllm.bench.kernels import report
from tritonllm.bench.kernels.attention import DecodeAttention, PrefillAttention
from tritonllm.bench.kernels.case import Case, Heads, Place, Work
from tritonllm.bench.kernels.catalog import CASES, Bar, Row
from tritonllm.bench.kernels.elementwise import RmsNorm
from tritonllm.bench.kernels.linears import HopperLinear, SkinnyLinear
from tritonllm.bench.kernels.measure import measure_ceilings, measure_rows
from tritonllm.bench.limits import Rates
from tritonllm.cli import main
from tritonllm.errors import ConfigError

PLACE = Place(torch.device("cpu"), torch.float32, rotated_bytes=1)
RATES = Rates(memory=1e9, matrix=4e9)
HEADS = Heads(4, 2, 16)
SMALL = """[
    {"op": "rms_norm", "tokens": 3, "columns": 8, "bar": {"us": 2}},
    {"op": "silu_and_mul", "tokens": 2, "columns": 8}
]"""


def clock(calls: Sequence[Callable[[], object]]) -> float:
    """Two microseconds for everything, once it has run."""
    for call in calls:
        call()
    return 2.0


def measured(*cases: Case, bar: Bar | None = None, timer: Any = clock) -> list[dict[str, Any]]:
    with torch.inference_mode():
        return list(measure_rows([Row(case, bar) for case in cases], PLACE, RATES, timer))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`run(*args)`: exit code, standard output and standard error of `tritonllm kernels bench`."""

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["kernels", "bench", *args])
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes in a GPU, and measures on the CPU by the made-up clock."""
    true_run = report.run

    def run(name: str, rows: Sequence[Row], place: Place, tell: Callable[[str], object]) -> dict[str, Any]:
        assert (place.device, place.dtype) == (torch.device("cuda", 0), torch.bfloat16)
        return true_run(name, rows, PLACE, tell, clock, lambda place, timer: RATES)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(report, "run", run)


@pytest.fixture
def small(tmp_path: Path) -> str:
    file = tmp_path / "rows.json"
    file.write_text(SMALL)
    return str(file)


class TestWork:
    @pytest.mark.parametrize(
        ("case", "work"),
        [
            (RmsNorm(3, 8), Work(2 * (24 + 24 + 8))),
            (CASES["add_rms_norm"](3, 8), Work(2 * (4 * 24 + 8))),
            (CASES["silu_and_mul"](3, 8), Work(2 * 3 * 24)),
            (CASES["store_kv"](HEADS, 5), Work(5 * (4 + 2 * 2 * 2 * 2 * 16))),
            (CASES["rope_store_kv"](HEADS, 5), Work(5 * (2 * 2 * 8 * 16 + 4 * 16))),
            (DecodeAttention(HEADS, 3, 10), Work(2 * (2 * 30 * 32 + 2 * 3 * 64), 4 * 30 * 64)),
            (CASES["fused_decode_attention"](HEADS, 3, 10), Work(2 * (2 * 30 * 32 + 3 * (128 + 64)), 4 * 30 * 64)),
            # 2 prompts of 3 queries, which see 3, 4 and 5 keys.
            (PrefillAttention("portable", HEADS, 2, 3, 2), Work(2 * (2 * 10 * 32 + 2 * 6 * 64), 4 * 64 * 24)),
            # With a window of 4: keys 7 to 10; and of 3 queries behind 4 keys, which see 4 each, all but the first.
            (DecodeAttention(HEADS, 3, 10, window=4), Work(2 * (2 * 12 * 32 + 2 * 3 * 64), 4 * 12 * 64)),
            (
                CASES["fused_decode_attention"](HEADS, 3, 10, window=4),
                Work(2 * (2 * 12 * 32 + 3 * (128 + 64)), 4 * 12 * 64),
            ),
            (
                PrefillAttention("portable", HEADS, 2, 3, 4, window=4),
                Work(2 * (2 * 2 * 6 * 32 + 2 * 6 * 64), 4 * 64 * 24),
            ),
            (SkinnyLinear(2, 10, 6), Work(2 * (60 + 20 + 12), 240)),
            (SkinnyLinear(2, 10, 6, True, True), Work(2 * (60 + 10 + 20 + 6), 240)),
            (SkinnyLinear(2, 10, 6, residual=True), Work(2 * (60 + 20 + 24), 240)),
            (CASES["sample_tokens"](100, 3, top_p=0.9), Work(2 * 300 + 12)),
            (CASES["sample_tokens"](100, 3, "flat", True, top_p=0.9), Work(4 * 300 + 12)),
        ],
        ids=lambda value: value.op if isinstance(value, Case) else "",
    )
    def test_bytes_and_operations_by_hand(self, case: Case, work: Work) -> None:
        assert case.work(2) == work

    def test_the_larger_time_is_the_floor(self) -> None:
        assert (Work(8, 4).seconds(RATES), Work(8, 4).bound(RATES)) == (8e-9, "memory")
        assert (Work(1, 40).seconds(RATES), Work(1, 40).bound(RATES)) == (1e-8, "matrix")

    def test_shapes_as_the_table_has_them(self) -> None:
        assert DecodeAttention(HEADS, 3, 10).shape == "4/2x16 batch 3 context 10"
        assert SkinnyLinear(1, 2, 3, normed=True).shape == "tokens 1 columns 2 rows 3 normed"
        assert CASES["sample_tokens"](9, 1, top_p=0.9).shape == "vocab_size 9 batch 1 peaked top_p 0.9"

    @pytest.mark.parametrize("text", ["16/8", "16x128", "a/bxc", "0/1x8", "9/2x64", ""])
    def test_wrong_heads(self, text: str) -> None:
        with pytest.raises(ConfigError, match="heads"):
            Heads.parse(text)


class TestPlace:
    def test_calls_rotate_over_more_than_the_cache_holds(self) -> None:
        place = Place(torch.device("cpu"), torch.float32)
        assert place.copies(1 << 20) * (1 << 20) >= ROTATED_BYTES
        assert (place.copies(1), place.copies(1 << 40), place.copies(1 << 40, fewest=8)) == (512, 2, 8)

    def test_each_call_has_tensors_of_its_own(self) -> None:
        prepared = DecodeAttention(HEADS, 2, 21, 16).prepare(Place(PLACE.device, PLACE.dtype, 20_000))
        tables = [call.args[3] for call in prepared.op.calls]
        assert len(tables) == -(-20_000 // (2 * 2 * 21 * 2 * 16 * 4))
        blocks = torch.cat([table.flatten() for table in tables])
        assert blocks.unique().numel() == blocks.numel()


class TestCeilings:
    def test_rates_from_times(self) -> None:
        rates = measure_ceilings(PLACE, clock, copy_bytes=1000, side=50)
        assert rates == Rates(memory=pytest.approx(2 * 1000 / 2e-6), matrix=pytest.approx(2 * 50**3 / 2e-6))

    def test_memory_counts_at_its_best(self) -> None:
        """A sum moves half of what a copy does."""
        for times, best in (([4.0, 2.0, 2.0], 1e9), ([4.0, 8.0, 1.0], 1e9), ([1.0, 8.0, 8.0], 2e9)):
            timer = iter([*times, 1.0])
            rates = measure_ceilings(PLACE, lambda calls, timer=timer: next(timer), copy_bytes=1000, side=50)
            assert rates.memory == pytest.approx(best)


class TestMeasuring:
    def test_a_row(self) -> None:
        (row,) = measured(DecodeAttention(HEADS, 2, 21, 16))
        assert (row["op"], row["shape"]) == ("decode_attention", "4/2x16 batch 2 context 21 block_size 16")
        assert row["case"] == {"heads": "4/2x16", "batch": 2, "context": 21, "block_size": 16}
        assert row["floor_us"] == pytest.approx(row["bytes"] / 1e3)
        assert row["fraction"] == pytest.approx(row["floor_us"] / 2)
        assert row["tb_per_second"] == pytest.approx(row["bytes"] / 2e-6 / 1e12)
        assert row["tflops"] == pytest.approx(row["operations"] / 2e-6 / 1e12)
        assert (row["us"], row["failed"], row["skipped"], row["bar"], row["reached"]) == (2, None, None, None, None)
        assert 0 <= row["error"] < 1e-4

    def test_it_is_checked_before_it_is_timed(self, monkeypatch) -> None:
        timed: list[Any] = []
        right = kernels.rms_norm
        monkeypatch.setattr(kernels, "rms_norm", lambda *args: right(*args) * 1.01)
        wrong, other = measured(RmsNorm(3, 8), CASES["silu_and_mul"](3, 8), timer=lambda calls: timed.append(0) or 1.0)
        assert wrong["failed"].startswith("KernelError: the result is wrong: its error is ")
        assert wrong["us"] is wrong["fraction"] is wrong["reached"] is None
        assert (other["failed"], other["us"], len(timed)) == (None, 1.0, 1)

    def test_nan_is_wrong(self, monkeypatch) -> None:
        monkeypatch.setattr(kernels, "rms_norm", lambda x, *_: x * float("nan"))
        (row,) = measured(RmsNorm(3, 8))
        assert "its error is inf" in row["failed"]

    def test_a_row_that_raises_leaves_the_others(self, monkeypatch) -> None:
        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("out of\nmemory")

        monkeypatch.setattr(kernels, "rms_norm", fail)
        wrong, other = measured(RmsNorm(3, 8), CASES["silu_and_mul"](3, 8), bar=Bar(us=1))
        assert (wrong["failed"], wrong["reached"]) == ("OutOfMemoryError: out of memory", None)
        assert (other["failed"], other["reached"]) == (None, False)

    def test_what_the_device_has_not_is_skipped(self) -> None:
        (row,) = measured(HopperLinear(3, 64, 32))
        assert row["skipped"] == "the op is for Hopper GPUs, 16-bit floats and rows of a multiple of 8"
        assert row["us"] is row["failed"] is None

    def test_a_device_that_is_lost_ends_the_rest(self, monkeypatch) -> None:
        monkeypatch.setattr("tritonllm.bench.kernels.measure._free", lambda place: "lost")
        first, second = measured(RmsNorm(3, 8), RmsNorm(3, 8))
        assert (first["failed"], second["failed"], second["us"]) == (None, "lost", None)

    def test_cublas_computes_the_product_alone(self) -> None:
        (row,) = measured(SkinnyLinear(3, 64, 32, normed=True, gated=True))
        assert row["rivals"] == {"cuBLAS": 2.0}

    def test_rivals_of_a_prefill(self) -> None:
        """On a CPU torch has flash attention, and no cuDNN."""
        (row,) = measured(PrefillAttention("portable", HEADS, 2, 21, block_size=16))
        assert row["failed"] is None
        assert row["rivals"] == {"SDPA flash": 2.0}
        assert list(row["failed_rivals"]) == ["cuDNN"]
        (behind,) = measured(PrefillAttention("portable", HEADS, 2, 21, prefix=5, block_size=16))
        assert behind["rivals"] == behind["failed_rivals"] == {}

    @pytest.mark.parametrize(
        ("bar", "reached"),
        [
            (Bar(us=2), True), (Bar(us=1.9), False), (Bar(tflops=1e-9), True), (Bar(tflops=1), False),
            (Bar(us=2, rival="cuBLAS"), True), (Bar(us=1, rival="cuBLAS"), False), (Bar(rival="MKL"), False),
        ],
    )  # fmt: skip
    def test_bars(self, bar: Bar, reached: bool) -> None:
        (row,) = measured(SkinnyLinear(3, 64, 32), bar=bar)
        assert row["reached"] is reached

    def test_a_rival_that_is_faster_is_not_beaten(self) -> None:
        times = iter([2.0, 1.9])
        (row,) = measured(SkinnyLinear(3, 64, 32), bar=Bar(rival="cuBLAS"), timer=lambda calls: next(times))
        assert (row["us"], row["rivals"], row["reached"]) == (2.0, {"cuBLAS": 1.9}, False)


@pytest.mark.usefixtures("on_cpu")
class TestCommand:
    def test_the_table(self, run, small: str) -> None:
        code, out, err = run("--rows", small)
        assert (code, err) == (0, "")
        first, ceilings, _, titles, norm, silu, _, last = out.splitlines()
        assert first.startswith(f"{small} in float32 on cpu, torch ")
        assert ceilings == "memory reaches 0.00 TB/s, a product 0 TFLOP/s"
        assert titles.split() == ["op", "shape", "us", "floor", "of", "it", "TB/s", "TFLOP/s", "beside", "it,", "bar"]
        assert norm.split() == [
            "rms_norm", "tokens", "3", "columns", "8", "2.00", "0.22", "11%", "0.00", "-", "<=", "2", "us:", "reached",
        ]  # fmt: skip
        assert silu.split()[:6] == ["silu_and_mul", "tokens", "2", "columns", "8", "2.00"]
        assert last.startswith("2 rows measured, 1 of 1 bars reached, ")

    def test_json_and_output(self, run, small: str, tmp_path: Path) -> None:
        file = tmp_path / "report.json"
        code, out, _ = run("--rows", small, "--json", "--output", str(file))
        (line,) = out.splitlines()
        told = json.loads(line)
        assert (code, told) == (0, json.loads(file.read_text()))
        assert (told["benchmark"], told["name"]) == ("kernels", small)
        assert told["ceilings"] == {"memory": 1e9, "matrix": 4e9}
        assert {"tritonllm", "commit", "torch", "triton", "python", "gpu", "driver", "dtype"} == set(told["conditions"])
        assert [row["op"] for row in told["rows"]] == ["rms_norm", "silu_and_mul"]
        assert told["rows"][0]["bar"] == {"us": 2, "tflops": None, "rival": None}

    def test_a_model_with_one_op(self, run, llama: str) -> None:
        args = ("--model", llama, "--op", "rms_norm", "--op", "skinny_linear", "--batches", "1,2")
        code, out, _ = run(*args, "--prompt-tokens", "9")
        assert code == 0
        lines = out.splitlines()[4:-2]
        ops = [line.split()[0] for line in lines]
        assert ops == ["rms_norm", *["skinny_linear"] * 5, "rms_norm", *["skinny_linear"] * 5, "rms_norm"]
        assert "cuBLAS 2.00 (1.00x)" in lines[1]

    def test_all_ops_of_a_model(self, run, llama: str) -> None:
        code, out, _ = run("--model", llama, "--batches", "2", "--context", "20", "--prompt-tokens", "9", "--json")
        rows = json.loads(out)["rows"]
        assert code == 0
        assert {row["op"] for row in rows if row["skipped"] is None} == {op for op in CASES if "hopper" not in op}

    def test_a_row_that_fails_is_shown_and_is_code_1(self, run, small: str, monkeypatch) -> None:
        monkeypatch.setattr(kernels, "rms_norm", lambda x, *_: x)
        code, out, _ = run("--rows", small)
        assert code == 1
        norm, silu, _, last = out.splitlines()[4:]
        assert "FAILED: KernelError: the result is wrong" in norm
        assert silu.split()[5] == "2.00"
        assert last.startswith("1 rows measured, 1 failed, 0 of 1 bars reached, ")

    def test_a_bar_that_is_missed_is_no_failure(self, run, small: str) -> None:
        Path(small).write_text(SMALL.replace('"us": 2', '"us": 1.5'))
        code, out, _ = run("--rows", small)
        assert code == 0
        assert "<= 1.5 us: MISSED" in out
        assert "0 of 1 bars reached" in out

    def test_what_is_skipped_says_why(self, run, tmp_path: Path) -> None:
        file = tmp_path / "rows.json"
        file.write_text('[{"op": "hopper_linear", "tokens": 3, "columns": 64, "rows": 32}]')
        code, out, _ = run("--rows", str(file))
        assert code == 0
        assert "skipped: the op is for Hopper GPUs" in out
        assert "0 rows measured, 1 skipped, " in out

    def test_a_plot(self, run, llama: str, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        file = tmp_path / "roofline.png"
        sizes = ("--batches", "2", "--context", "20", "--prompt-tokens", "9")
        code, _, err = run("--model", llama, *sizes, "--plot", str(file))
        assert (code, file.read_bytes()[:4]) == (0, b"\x89PNG"), err
        assert err == f"The plot is in {file}.\n"

    def test_a_plot_of_nothing_that_multiplies(self, run, small: str, tmp_path: Path, monkeypatch) -> None:
        pytest.importorskip("matplotlib")
        monkeypatch.setattr(kernels, "silu_and_mul", lambda x: x)
        file = tmp_path / "roofline.svg"
        code, _, _ = run("--rows", small, "--plot", str(file))
        assert (code, file.read_text()[:5]) == (1, "<?xml")


class TestRefusals:
    def test_without_a_gpu(self, run, monkeypatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        for args in ((), ("--rows", "h200"), ("--json",)):
            error = "error: `tritonllm kernels bench` measures a GPU, and torch sees none here.\n"
            assert run(*args) == (1, "", error)

    @pytest.mark.parametrize(
        ("args", "reason"),
        [
            (["--rows", "h200", "--model", "Qwen3-0.6B"], "give --model or --rows, not both."),
            (["--rows", "none"], "--rows: 'none' is no file and none of the shipped lists"),
            (["--op", "matmul"], "--op 'matmul' is in none of the rows: the ops are load_rows, "),
            (["--rows", "h200", "--op", "rms_norm"], "the ops are prefill_attention, "),
            (["--batches", "1,x"], "--batches '1,x' is no list of numbers above 0"),
            (["--dtype", "float32"], "--dtype 'float32' is neither bfloat16 nor float16."),
            (["--plot", "x.jpeg"], "--plot x.jpeg must end in one of .png, .svg, .pdf."),
            (["--plot", "/no/folder/x.png"], "--plot /no/folder/x.png: there is no folder /no/folder."),
            (["--output", "/no/folder/x"], "--output /no/folder/x: there is no folder /no/folder."),
        ],
    )
    def test_wrong_usage_is_code_2(self, run, args: list[str], reason: str) -> None:
        code, out, err = run(*args)
        assert (code, out) == (2, "")
        assert reason in " ".join(err.replace("│", " ").split())

    def test_a_bad_name_is_code_1(self, run) -> None:
        code, out, err = run("--model", "Qwen3-0.6")
        assert (code, out) == (1, "")
        assert "did you mean 'Qwen3-0.6B'?" in err

    def test_a_plot_without_matplotlib(self, run, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        code, out, err = run("--plot", str(tmp_path / "x.png"))
        assert (code, out) == (1, "")
        assert err.startswith("error: --plot needs matplotlib, which is not installed")
