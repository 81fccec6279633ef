"""`tritonllm bench` on a tiny model: every command, its JSON and table, and what is refused with which exit code."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tritonllm
from tritonllm.bench import step_profile, streaming, throughput
from tritonllm.bench.report import as_text
from tritonllm.bench.startup import PARTS
from tritonllm.bench.timing import timed_generate
from tritonllm.cli import main
from tritonllm.errors import EngineError
from tritonllm.sampling_params import SamplingParams

SOURCE = Path(tritonllm.__file__).parents[1]
CPU = ("--device", "cpu", "--block-size", "16")
RATES = ("--memory-rate", "0.01", "--matrix-rate", "0.1")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`run(*args)`: exit code, standard output and standard error of `tritonllm bench`."""

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["bench", *args])
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return call


def report(result: tuple[int, str, str]) -> dict[str, Any]:
    """The one line of JSON that is all of standard output."""
    code, out, err = result
    assert code == 0, err
    (line,) = out.splitlines()
    return json.loads(line)


class TestThroughput:
    SIZES = ("--num-prompts", "3", "--shortest", "2", "--longest", "6", "--runs", "2")

    def test_json(self, run, llama: str, tmp_path) -> None:
        file = tmp_path / "report.json"
        told = report(run("throughput", llama, *CPU, *RATES, *self.SIZES, "--json", "--output", str(file)))
        assert json.loads(file.read_text()) == told
        assert (told["benchmark"], told["model"]) == ("throughput", llama)
        conditions = told["conditions"]
        assert {"tritonllm", "commit", "torch", "triton", "python", "gpu", "driver"} <= set(conditions)
        assert (conditions["device"], conditions["dtype"], conditions["load_format"]) == ("cpu", "float32", "dummy")
        assert (conditions["max_num_sequences"], conditions["block_size"], conditions["gpu"]) == (3, 16, None)
        assert told["floors"]["rates"] == {"memory": 1e10, "matrix": 1e11}
        assert 6 <= told["output_tokens"] <= 18
        assert told["seconds"] in [each["seconds"] for each in told["runs"]]
        assert [each["preemptions"] for each in told["runs"]] == [0, 0]
        assert told["fraction"] == pytest.approx(told["floor_seconds"] / told["seconds"], abs=0.05)
        assert told["output_tokens_per_second"] < told["floor_output_tokens_per_second"]

    def test_table_of_real_weights_without_floors(self, run, llama: str) -> None:
        code, out, _ = run("throughput", llama, *CPU, *self.SIZES, "--load-format", "auto")
        assert code == 0
        first, _, titles, row = out.splitlines()
        assert first.startswith(f"{llama} with its own weights in float32 on cpu, torch ")
        assert titles.split()[:4] == ["output", "tokens/s", "floor", "of"]
        assert row.split()[1:3] == ["unknown", "unknown"]

    def test_the_module_prints_the_same_json(self, llama: str, monkeypatch, capsys) -> None:
        monkeypatch.setattr(sys, "argv", ["throughput", llama, *CPU, *self.SIZES[:-2]])
        with pytest.raises(SystemExit) as left:
            throughput.main()
        captured = capsys.readouterr()
        told = report((int(left.value.code or 0), captured.out, captured.err))
        assert len(told["runs"]) == 1
        keys = ("model", "start_seconds", "seconds", "prompt_tokens", "output_tokens", "steps", "preemptions")
        assert {*keys, "output_tokens_per_second"} <= set(told)


class TestLatency:
    SIZES = ("--prompt-tokens", "8", "--output-tokens", "16", "--runs", "3")
    REGEX = ("--regex", "[a-z ]*", "--load-format", "auto")

    def test_json_with_a_profile(self, run, llama: str) -> None:
        told = report(run("latency", llama, *CPU, *RATES, *self.SIZES, "--batches", "1,3", "--profile", "--json"))
        assert [row["batch"] for row in told["batches"]] == [1, 3]
        for row in told["batches"]:
            assert 0 < row["floor_ms"] < row["ms_per_token"]
            assert row["fraction"] == pytest.approx(row["floor_ms"] / row["ms_per_token"], abs=1e-3)
            assert row["decode_tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["ms_per_token"], rel=1e-3)
            for each in row["runs"]:
                step = (each["seconds"] - each["seconds_of_one_token"]) / 15
                assert each["ms_per_token"] == pytest.approx(1e3 * step, abs=1e-3)
            profile = row["profile"]
            assert set(profile["host_us"]) == {"schedule", "launch", "postprocess"}
            assert all(0 < taken < profile["step_us"] * 100 for taken in profile["host_us"].values())
            assert profile["gpu_busy_us"] is profile["gpu_idle_share"] is profile["kernels"] is None
        assert told["batches"][0]["floor_ms"] < told["batches"][1]["floor_ms"]
        assert "host: schedule" in as_text(told)

    def test_prompts_of_a_batch_do_not_wait_for_each_other(self, run, llama: str) -> None:
        sizes = ("--prompt-tokens", "200", "--output-tokens", "4", "--batches", "3", "--runs", "1")
        told = report(run("latency", llama, *CPU, *sizes, "--max-num-batched-tokens", "400", "--json"))
        assert told["conditions"]["max_prefill_tokens_beside_decode"] == 400

    def test_outputs_that_follow_a_regular_expression(self, run, llama: str) -> None:
        pytest.importorskip("llguidance")
        told = report(run("latency", llama, *CPU, *self.SIZES, "--batches", "2", "--json", *self.REGEX))
        assert told["regex"] == "[a-z ]*"
        assert told["batches"][0]["ms_per_token"] > 0
        for tokenizer, why in ((), "needs a tokenizer"), (("--tokenizer", llama), "regex='(x' cannot be followed"):
            code, _, err = run("latency", llama, *CPU, *self.SIZES, "--batches", "2", "--regex", "(x", *tokenizer)
            assert (code, why in " ".join(err.split())) == (1, True)

    def test_sampling_reaches_the_requests(self, run, llama: str, monkeypatch) -> None:
        from tritonllm import LLMEngine

        asked, generate = [], LLMEngine.generate

        def spy(llm: LLMEngine, prompts: Any, params: Any, use_tqdm: bool = False) -> dict[str, Any]:
            asked.extend(params)
            return generate(llm, prompts, params, use_tqdm)

        monkeypatch.setattr(LLMEngine, "generate", spy)
        options = ("--temperature", "0.6", "--top-p", "0.9", "--repetition-penalty", "1.5")
        told = report(run("latency", llama, *CPU, *self.SIZES, "--batches", "2", "--profile", "--json", *options))
        assert (told["temperature"], told["top_p"], told["repetition_penalty"]) == (0.6, 0.9, 1.5)
        measured = asked[1:]  # the first is the engine's own warm-up call, before anything is measured
        assert measured
        assert all(each.ignore_eos and each.max_tokens in (1, 2, 16) for each in measured)
        assert {(each.temperature, each.top_p, each.repetition_penalty) for each in measured} == {(0.6, 0.9, 1.5)}
        code, _, err = run("latency", llama, *CPU, *self.SIZES, "--top-p", "1.5")
        assert (code, "top_p" in err) == (1, True)

    def test_the_profilers_events_become_kernels_and_busy_time(self, make_engine, monkeypatch) -> None:
        from torch.autograd import DeviceType

        def event(name: str, start: float, end: float, device: Any = DeviceType.CUDA) -> SimpleNamespace:
            span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
            return SimpleNamespace(name=name, device_type=device, time_range=span)

        events = [event("b", 3, 9), event("a", 0, 4), event("a", 20, 22), event("launch", 0, 99, DeviceType.CPU)]
        profiler = contextlib.nullcontext(SimpleNamespace(events=lambda: events))
        monkeypatch.setattr("torch.profiler.profile", lambda **_: profiler)
        llm = make_engine()
        llm.add_prompt([2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
        busy, (first, second) = step_profile._profile(llm, 2)
        assert busy == (9 + 2) / 2
        assert first == {"name": "b", "us_per_step": 3, "launches_per_step": 0.5, "us_per_launch": 6}
        assert second == {"name": "a", "us_per_step": 3, "launches_per_step": 1, "us_per_launch": 3}

    def test_a_batch_that_does_not_run_together_is_an_error(self, run, llama: str) -> None:
        code, out, err = run("latency", llama, "--device", "cpu", *self.SIZES, "--batches", "4")
        assert (code, out) == (1, "")
        assert "error: a batch of 4 took 3" in err
        assert "lower --batches" in err

    def test_a_profile_of_requests_that_end_too_soon_is_an_error(self, make_engine) -> None:
        llm = make_engine(max_num_batched_tokens=5, max_num_sequences=4)
        prompts = [[token] * 30 for token in (5, 6, 7, 8)]
        bench = SimpleNamespace(llm=llm, sampling=SamplingParams(temperature=0), prompts=lambda count, length: prompts)
        with pytest.raises(EngineError, match="raise --max-num-batched-tokens"):
            step_profile.profile_steps(bench, 4, 30, 8)
        assert llm.scheduler.is_finished()
        assert len(llm.generate([[1, 2]])["token_ids"]) == 1

    def test_a_plot(self, run, llama: str, tmp_path) -> None:
        pytest.importorskip("matplotlib")
        file = tmp_path / "latency.png"
        code, _, err = run("latency", llama, *CPU, *self.SIZES, "--batches", "1,2", "--plot", str(file))
        assert (code, file.read_bytes()[:4]) == (0, b"\x89PNG"), err
        assert f"The plot is in {file}." in err

    def test_a_plot_without_matplotlib(self, run, llama: str, tmp_path, monkeypatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert run("latency", llama, *CPU, "--plot", str(tmp_path / "x.png")) == (
            1,
            "",
            "error: --plot needs matplotlib, which is not installed: "
            "`pip install 'tritonllm-engine[bench]'` brings it.\n",
        )


def test_ttft(run, llama: str) -> None:
    told = report(run("ttft", llama, *CPU, *RATES, "--lengths", "2,60", "--runs", "3", "--json"))
    assert [row["prompt_tokens"] for row in told["lengths"]] == [2, 60]
    for row in told["lengths"]:
        assert row["ms"] == sorted(row["runs"])[1]
        assert 0 < row["floor_ms"] < row["ms"]
        assert row["fraction"] == pytest.approx(row["floor_ms"] / row["ms"], abs=0.01)


def test_two_ranks_share_the_floor(run, llama: str) -> None:
    rates = ("--memory-rate", "0.0001", "--matrix-rate", "0.0001")
    sizes = ("--lengths", "40", "--runs", "1", "--json")
    alone, shared = (report(run("ttft", llama, *CPU, *rates, *sizes, "--world-size", size)) for size in ("1", "2"))
    assert shared["conditions"]["world_size"] == 2
    assert shared["lengths"][0]["floor_ms"] == pytest.approx(alone["lengths"][0]["floor_ms"] / 2, rel=0.01)


class TestStreaming:
    SIZES = (
        "--streams",
        "3",
        "--output-tokens",
        "24",
        "--prompt-tokens",
        "40",
        "--interval",
        "0.1",
        "--seconds",
        "0.3",
    )

    def test_json(self, run, llama: str) -> None:
        told = report(run("streaming", llama, *CPU, *RATES, *self.SIZES, "--json"))
        conditions = told["conditions"]
        assert (conditions["max_num_sequences"], conditions["max_prefill_tokens_beside_decode"]) == (11, 512)
        assert 0 < told["median_gap_ms"] <= told["p99_gap_ms"] <= told["longest_gap_ms"]
        assert told["p99_over_median"] == pytest.approx(told["p99_gap_ms"] / told["median_gap_ms"], abs=0.02)
        assert 0 < told["floor_ms"] < told["median_gap_ms"]
        assert told["seconds"] >= 0.3
        assert 1 <= told["prompts"] <= 4
        assert 0 < told["median_ttft_ms"] <= told["longest_ttft_ms"]
        # Not the first tokens of streams that took the place of others.
        assert told["gaps"] <= 3 * told["steps"]
        assert told["output_tokens_per_second"] == pytest.approx(told["gaps"] / told["seconds"], rel=0.01)

    def test_a_table(self, run, llama: str) -> None:
        code, out, _ = run("streaming", llama, *CPU, *self.SIZES)
        assert code == 0
        titles = "streams median gap, ms floor of it p99 over median longest prompts ms to first token"
        assert " ".join(out.splitlines()[2].split()).startswith(titles)

    def test_gaps_are_those_between_reads(self, make_engine, monkeypatch) -> None:
        """On a clock that ticks once a step, a stream has a token every tick."""
        llm, ticks = make_engine(max_prefill_tokens_beside_decode=16), itertools.count()
        rng = random.Random(0)
        bench = SimpleNamespace(
            llm=llm,
            start_seconds=0.0,
            prompts=lambda count, length: [[rng.randint(2, 500) for _ in range(length)] for _ in range(count)],
            limits=SimpleNamespace(decode_seconds=lambda *_: None),
        )
        clock = SimpleNamespace(now=0.0)
        advance = llm.step_loop.advance

        def step() -> object:
            clock.now = float(next(ticks))
            return advance()

        monkeypatch.setattr(llm.step_loop, "advance", step)
        monkeypatch.setattr("tritonllm.bench.streaming.time.perf_counter", lambda: clock.now)
        told = streaming.measure(bench, 3, 20, 40, 10.0, 60.0)
        assert (told["median_gap_ms"], told["p99_gap_ms"], told["longest_gap_ms"]) == (1000, 1000, 1000)
        assert told["prompts"] == 6
        assert told["median_ttft_ms"] == 4000  # three chunks, read a step later
        assert 3 * 60 > told["gaps"] > 3 * 60 * 0.8
        assert told["fraction"] is told["floor_ms"] is None
        assert llm.scheduler.is_finished()

    def test_a_request_that_fails_is_an_error(self, make_engine) -> None:
        llm = make_engine()
        completion = llm.queue_prompt([1, 2], SamplingParams(max_tokens=4))[0]
        llm.step_loop.abandon([completion.seq])
        with pytest.raises(EngineError, match="a request ended by 'abort'"):
            streaming._check(completion)

    def test_percentiles(self) -> None:
        values = list(range(1, 201))
        assert [streaming.percentile(values, percent) for percent in (0, 50, 99, 100)] == [1, 100, 198, 200]
        assert streaming.percentile([5.0], 99) == 5.0


class TestStartup:
    def test_two_processes_a_run(self, run, llama: str) -> None:
        told = report(run("startup", llama, *CPU, "--runs", "1", "--max-model-length", "64", "--json"))
        cold, warm = told["starts"]
        assert (cold["triton_cache"], warm["triton_cache"]) == ("cold", "warm")
        for start in (cold, warm):
            parts = [start[f"{part}_seconds"] for part in ("import_torch", "engine", "first_token")]
            assert min(parts) > 0
            assert sum(parts) < start["process_seconds"] + 0.05
        assert told["conditions"]["max_model_length"] == 64

    def test_it_can_begin_with_a_given_cache(self, run, llama: str, monkeypatch, tmp_path: Path) -> None:
        (tmp_path / "kernel").touch()
        seen = []

        def started(*_: object, env: dict[str, str], **__: object) -> subprocess.CompletedProcess[str]:
            cache = Path(env["TRITON_CACHE_DIR"])
            seen.append(sorted(path.name for path in cache.iterdir()))
            (cache / "compiled").touch()
            told = {**dict.fromkeys(PARTS, 1.0), "conditions": {}}
            return subprocess.CompletedProcess([], 0, stdout=json.dumps(told), stderr="")

        monkeypatch.setattr("tritonllm.bench.startup.subprocess.run", started)
        options = ("--max-model-length", "64", "--runs", "2", "--json", "--triton-cache", str(tmp_path))
        told = report(run("startup", llama, *CPU, *options))
        assert [start["triton_cache"] for start in told["starts"]] == ["given", "warm"]
        assert seen == [["kernel"], ["compiled", "kernel"]] * 2
        assert [path.name for path in tmp_path.iterdir()] == ["kernel"]

    @pytest.mark.parametrize(("said", "reason"), [("a warning\nout of memory\n", "out of memory"), ("", "exit code 9")])
    def test_a_process_that_fails_says_why(self, run, llama: str, monkeypatch, said: str, reason: str) -> None:
        failed = subprocess.CompletedProcess([], 9, stdout="", stderr=said)
        monkeypatch.setattr("tritonllm.bench.startup.subprocess.run", lambda *_, **__: failed)
        error = f"error: the process that starts the engine failed: {reason}\n"
        assert run("startup", llama, *CPU, "--max-model-length", "64") == (1, "", error)


class TestRefusals:
    @pytest.mark.parametrize("command", ["throughput", "latency", "ttft", "streaming", "startup"])
    def test_a_bad_name_is_one_line_and_code_1(self, run, command: str) -> None:
        assert run(command, "Qwen3-0.6") == (
            1,
            "",
            "error: 'Qwen3-0.6' is no folder, no shipped shape and no hub id 'owner/name': "
            "did you mean 'Qwen3-0.6B'?\n",
        )

    @pytest.mark.parametrize(
        ("args", "reason"),
        [
            (["throughput", "--shortest", "9", "--longest", "8"], "--shortest 9 is above --longest 8."),
            (["throughput", "--runs", "0"], "--runs"),
            (["latency", "--batches", "1,x"], "--batches '1,x' is no list of numbers above 0, such as 1,8,16."),
            (["latency", "--batches", ""], "is no list of numbers"),
            (["latency", "--batches", "0"], "is no list of numbers"),
            (["latency", "--output-tokens", "1"], "--output-tokens"),
            (["latency", "--output-tokens", "4", "--profile"], "at least 8 --output-tokens, not 4."),
            (["latency", "--regex", "a*", "--profile"], "--profile takes steps apart in a way that those of --regex"),
            (["latency", "--plot", "x.jpeg"], "--plot x.jpeg must end in one of .png, .svg, .pdf."),
            (["latency", "--plot", "/no/folder/x.png"], "--plot /no/folder/x.png: there is no folder /no/folder."),
            (["ttft", "--lengths", "-1"], "--lengths '-1' is no list of numbers"),
            (["ttft", "--output", "/no/folder/x"], "--output /no/folder/x: there is no folder /no/folder."),
            (["ttft", "--memory-rate", "0"], "0.0 is no rate above 0."),
            (["ttft", "--matrix-rate", "nan"], "nan is no rate above 0."),
            (["streaming", "--interval", "0"], "--interval"),
            (["startup", "--dtype", "int8"], "dtype='int8' is not valid"),
            (["startup", "--load-format", "real"], "load_format='real' is not valid"),
        ],
    )
    def test_wrong_usage_is_code_2(self, run, args: list[str], reason: str) -> None:
        code, out, err = run(args[0], "Qwen3-0.6B", *args[1:])
        assert (code, out) == (2, "")
        assert reason in " ".join(err.split())

    def test_one_rate_alone(self, run, llama: str) -> None:
        code, out, err = run("ttft", llama, *CPU, "--lengths", "2", "--memory-rate", "1")
        assert (code, out) == (1, "")
        assert "give --matrix-rate as well, or neither." in err

    def test_an_output_of_a_wrong_length(self) -> None:
        def generate(prompts: Any, params: Any) -> dict[str, list[Any]]:
            return {"token_ids": [[1, 2], [1]], "errors": [None, None], "finish_reason": ["length", "stop"]}

        params = [SamplingParams(max_tokens=2)] * 2
        with pytest.raises(EngineError, match=r"^output 1 has 1 tokens and not the 2 .*: finish reason 'stop'\.$"):
            timed_generate(SimpleNamespace(generate=generate), [[1], [2]], params)


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["latency", "--help"],
        ["ttft", "Qwen3-0.6B", "--lengths", "x"],
        ["streaming", "Qwen3-0.6B", "--interval", "x"],
    ],
)
def test_help_and_wrong_usage_import_no_torch(args: list[str]) -> None:
    code = (
        "import sys, tritonllm.cli\n"
        "try:\n    tritonllm.cli.main(['bench', *sys.argv[1:]])\n"
        "except SystemExit:\n    print(*({'torch', 'triton', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.splitlines()[-1] == ""
