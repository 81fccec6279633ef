"""Completions that follow a grammar: every token fits, and nothing else about a request or its neighbours changes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tritonllm import AsyncLLMEngine, LLMEngine, SamplingParams, Sequence, StructuredOutputsParams
from tritonllm.engine.device_steps import Part
from tritonllm.engine.grammars import Grammars
from tritonllm.engine.plan import masks_of
from tritonllm.errors import EngineError, RequestError

llguidance = pytest.importorskip("llguidance")

PROMPT = [7, 3, 3, 11, 5, 9, 9, 9, 2, 40]
EOS = 1
ANYTHING = r"(?s:.*)"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 5}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def following(seed: int = 0, **form: object) -> SamplingParams:
    """A hot request, so that the model alone would never keep to the form."""
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=60, structured_outputs=StructuredOutputsParams(**form))


def assert_follows(form: StructuredOutputsParams, text: str, finish_reason: str) -> None:
    """A text that is cut off begins like one that follows the form; what that is, llguidance is asked elsewhere."""
    if form.regex is not None:
        assert re.fullmatch(form.regex, text), text
    elif form.choice is not None:
        assert text in form.choice
    elif form.json is not None and finish_reason == "stop":
        value = json.loads(text)
        assert {*value} == {"a", "b"}
        assert type(value["a"]) is int
        assert len(value["b"]) <= 5
    elif form.grammar is not None:
        assert re.fullmatch(r"\d+([+-]\d+)*", text), text


FORMS = {
    "json": following(json=SCHEMA, seed=3),
    "regex": following(regex=r"[a-f]{3}-[0-9]{2,4}"),
    "choice": following(choice=["red", 'gr"een', "blue\n"]),
    "grammar": following(grammar='start: num (("+" | "-") num)*\nnum: /[0-9]{1,3}/'),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"top_p": 0.9, "top_k": 50, "presence_penalty": 1.0}])
def test_completions_follow_their_forms(engine: LLMEngine, name: str, fields: dict) -> None:
    params = replace(FORMS[name], **fields)
    result = engine.generate([PROMPT, PROMPT[:3]], params)
    assert result["errors"] == [None, None]
    for text, tokens, reason in zip(result["text"], result["token_ids"], result["finish_reason"], strict=True):
        assert params.structured_outputs is not None
        if reason == "stop":
            assert tokens[-1] == EOS
            assert_follows(params.structured_outputs, text, reason)
        else:
            assert len(tokens) == 60
            assert name in ("json", "grammar")
    assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]


class TestMasks:
    @pytest.fixture
    def make(self, engine: LLMEngine) -> Callable:
        def make(vocab_size: int = 512, eos: tuple[int, ...] = (EOS,), **fields):
            return Grammars(engine.tokenizer, vocab_size, eos).matcher(SamplingParams(**fields))

        return make

    @staticmethod
    def allowed(matcher) -> set[int]:
        bits = np.unpackbits(np.frombuffer(matcher.mask(), dtype=np.uint8), bitorder="little")
        return {*np.nonzero(bits)[0].tolist()}

    def test_the_end_is_allowed_where_the_grammar_may_end_and_alone_where_it_must(self, engine, make) -> None:
        matcher = make(structured_outputs=StructuredOutputsParams(regex="[0-9]{1,2}"))
        digits = {engine.tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)}
        one = min(digits)
        assert self.allowed(matcher) == digits
        assert matcher.accept([one]) is None
        assert self.allowed(matcher) == {*digits, EOS}
        assert matcher.accept([one]) is None
        assert self.allowed(matcher) == {EOS}

    @pytest.mark.parametrize("vocab_size", [300, 469, 500, 512, 1000])
    def test_ids_that_the_tokenizer_or_the_model_lacks_are_never_allowed(self, engine, make, vocab_size: int) -> None:
        matcher = make(vocab_size, structured_outputs=StructuredOutputsParams(regex=ANYTHING))
        assert len(matcher.mask()) == 4 * -(-vocab_size // 32)
        allowed = self.allowed(matcher)
        assert EOS in allowed
        assert max(allowed) < min(len(engine.tokenizer), vocab_size)
        assert len(allowed) > 200

    def test_the_least_number_of_tokens_counts_as_long_as_the_grammar_goes_on(self, engine, make) -> None:
        end = engine.tokenizer.convert_tokens_to_ids("5")
        form = StructuredOutputsParams(regex="[0-9]{1,4}")
        matcher = make(structured_outputs=form, min_tokens=9, max_tokens=20, stop_token_ids=(end,))
        for _ in range(4):
            assert not {EOS, end} & self.allowed(matcher)
            matcher.accept([engine.tokenizer.convert_tokens_to_ids("7")])
        assert self.allowed(matcher) == {EOS, end}

    def test_other_tokens_that_end_the_text_are_allowed_with_its_end(self, engine, make) -> None:
        digit, other = (engine.tokenizer.convert_tokens_to_ids(text) for text in "7x")
        matcher = make(structured_outputs=StructuredOutputsParams(regex="[0-9]"), stop_token_ids=(other,))
        assert other not in self.allowed(matcher)
        matcher.accept([digit])
        assert self.allowed(matcher) == {EOS, other}

    def test_a_token_that_ends_the_text_inside_its_form_brings_no_other_end(self, engine, make) -> None:
        digits = {engine.tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)}
        other = engine.tokenizer.convert_tokens_to_ids("x")
        matcher = make(
            structured_outputs=StructuredOutputsParams(regex="[0-9]{2}"), stop_token_ids=(min(digits), other)
        )
        for _ in range(2):
            assert self.allowed(matcher) == digits
            matcher.accept([max(digits)])
        assert self.allowed(matcher) == {EOS, min(digits), other}

    def test_a_token_that_does_not_fit_is_an_error_with_its_place(self, engine, make) -> None:
        matcher = make(structured_outputs=StructuredOutputsParams(regex="[0-9]+"))
        assert matcher.accept([engine.tokenizer.convert_tokens_to_ids("7")]) is None
        error = matcher.accept([engine.tokenizer.convert_tokens_to_ids("x")])
        assert error is not None
        assert error.startswith("the grammar cannot go on behind token 2: ")
        assert "\n" not in error

    def test_requests_with_one_grammar_compile_it_once_and_share_no_state(self, engine: LLMEngine) -> None:
        grammars = Grammars(engine.tokenizer, 512, {EOS})
        params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["red", "blue"]))
        first, second = grammars.matcher(params), grammars.matcher(replace(params, seed=4))
        assert grammars._compiled.cache_info().misses == 1
        before = second.mask()
        first.accept(engine.tokenizer.encode("red", add_special_tokens=False))
        assert first.mask() != before == second.mask()


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({}, "with nothing: give exactly one"),
            ({"regex": "a", "choice": ["b"]}, "with regex and choice: give exactly one"),
            ({"regex": ""}, "regex='' is not valid"),
            ({"regex": 3}, "regex=3 is not valid"),
            ({"choice": []}, r"choice=\(\) is not valid"),
            ({"choice": ["a", ""]}, "choice=.* is not valid"),
            ({"json": "{"}, "json='{' is not JSON"),
            ({"json": "[1]"}, r"json='\[1\]' is not a schema"),
            ({"json": {"enum": [object()]}}, "cannot be written as JSON"),
            ({"json": 1}, "json=1 is not valid"),
        ],
    )
    def test_of_forms(self, fields: dict, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            StructuredOutputsParams(**fields)

    @pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"allowed_token_ids": [3]}])
    def test_of_fields_that_contradict(self, fields: dict) -> None:
        with pytest.raises(RequestError, match=f"{next(iter(fields))}=.* does not go with structured_outputs"):
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **fields)
        with pytest.raises(RequestError, match="structured_outputs='a' is not valid: give a StructuredOutputsParams"):
            SamplingParams(structured_outputs="a")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("form", "message"),
        [
            ({"regex": "(a"}, r"regex='\(a' cannot be followed: (?s:.*)unclosed group"),
            ({"regex": "(?=a)b"}, "look-around"),
            ({"json": {"not": {"type": "string"}}}, "Unimplemented keys"),
            ({"json": {"type": "strin"}}, "Invalid type: strin"),
            ({"grammar": "start: nothing"}, "nothing"),
            ({"regex": "a" * 500 + "("}, r"regex='a{199}\.\.\. cannot be followed"),
        ],
    )
    def test_of_grammars_come_before_anything_is_queued(self, engine: LLMEngine, form: dict, message: str) -> None:
        params = [SamplingParams(max_tokens=3), SamplingParams(structured_outputs=StructuredOutputsParams(**form))]
        with pytest.raises(RequestError, match=f"prompt 1: (?s:.*){message}"):
            engine.generate([PROMPT, PROMPT], params)
        with pytest.raises(RequestError, match=message):
            engine.add_prompt(PROMPT, params[1])
        assert engine.scheduler.is_finished()
        assert engine.stats()["requests"] == 0

    def test_without_the_library_its_extra_is_named(self, engine: LLMEngine, monkeypatch) -> None:
        monkeypatch.setitem(sys.modules, "llguidance.hf", None)
        with pytest.raises(RequestError, match=r"pip install 'tritonllm-engine\[structured\]'"):
            engine.generate([PROMPT], FORMS["regex"])

    @pytest.mark.parametrize(
        ("tokenizer", "eos", "message"),
        [
            (None, (1,), "needs a tokenizer"),
            ([0] * 400, (1,), "cannot be used with the tokenizer list: Only fast tokenizers"),
            ([0] * 400, (), "needs an end-of-text id"),
            ([0] * 400, (511,), r"\[511\] has none; set the eos key"),
        ],
    )
    def test_of_tokenizers(self, tokenizer, eos: tuple[int, ...], message: str) -> None:
        with pytest.raises(RequestError, match=message):
            Grammars(tokenizer, 512, eos).matcher(FORMS["regex"])

    def test_of_a_tokenizer_whose_tokens_are_no_bytes(self) -> None:
        words = Tokenizer(WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
        with pytest.raises(RequestError, match="cannot be used with the tokenizer .*decoder"):
            Grammars(tokenizer, 512, (1,)).matcher(FORMS["regex"])

    def test_of_a_sequence_without_a_matcher(self) -> None:
        with pytest.raises(RequestError, match="needs a matcher"):
            Sequence(PROMPT, FORMS["regex"])

    def test_of_a_choice_without_a_step(self, engine: LLMEngine) -> None:
        with pytest.raises(EngineError, match="without a step that waits for masks"):
            engine.runner.choose([])


def test_a_form_that_forbids_nothing_changes_nothing(make_engine) -> None:
    """But for special tokens and for what is no UTF-8, which this model may not choose in either run."""
    engine = make_engine()
    valid = following(regex=ANYTHING)
    mask = engine._grammars.matcher(valid).mask()
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    texts = [t for t in range(3, 512) if bits[t] and engine.tokenizer.decode([t]).isascii()]
    free = SamplingParams(temperature=0.9, seed=4, max_tokens=30, allowed_token_ids=tuple(texts))
    bias = {token: 0.0 if token in texts else -100.0 for token in range(512)}
    bound = SamplingParams(
        temperature=0.9, seed=4, max_tokens=30, logit_bias=bias, structured_outputs=valid.structured_outputs
    )
    assert engine.generate([PROMPT], bound)["token_ids"] == engine.generate([PROMPT], free)["token_ids"]


OTHERS = [
    SamplingParams(temperature=0, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, top_p=0.7, top_k=20, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, allowed_token_ids=(3, 5, 8), max_tokens=12, ignore_eos=True, logprobs=1),
]
MIXED = [*OTHERS, *FORMS.values()]
PROMPTS = [[*PROMPT, index] * (1 + index % 3) for index in range(len(MIXED))]


@pytest.fixture(scope="module")
def alone(llama: str) -> list[list[int]]:
    """What each request of the mixed batch gives by itself."""
    with LLMEngine(llama, device="cpu", block_size=16, max_model_length=128, max_num_sequences=1) as engine:
        return [engine.generate([p], param)["token_ids"][0] for p, param in zip(PROMPTS, MIXED, strict=True)]


class TestInABatch:
    @pytest.mark.parametrize("keys", [{}, {"max_num_batched_tokens": 9}, {"max_num_sequences": 3}])
    def test_everybody_gets_what_they_get_alone(self, make_engine, alone, keys: dict) -> None:
        engine = make_engine(**{"max_num_sequences": 8, "max_model_length": 128, **keys})
        for _ in range(2):  # the second time with a prefix cache
            assert engine.generate(PROMPTS, MIXED)["token_ids"] == alone

    def test_preemption_keeps_where_a_grammar_stands(self, make_engine, alone) -> None:
        engine = make_engine(max_num_sequences=8, max_model_length=128, max_cached_blocks=33, block_size=4)
        preempted, preempt = [], engine.scheduler._preempt

        def recorded(seq: Sequence) -> None:
            preempted.append(0 if seq.matcher is None else seq.matcher.num_tokens)
            preempt(seq)

        engine.scheduler._preempt = recorded  # type: ignore[method-assign]
        assert engine.generate(PROMPTS, MIXED)["token_ids"] == alone
        assert max(preempted) > 3

    def test_streams_and_coroutines_say_the_same(self, make_engine, llama: str, alone) -> None:
        engine = make_engine(max_num_sequences=8, max_model_length=128)
        pieces = list(engine.stream(PROMPTS, MIXED))
        assert [sum((p.token_ids for p in pieces if p.index == i), []) for i in range(len(MIXED))] == alone

    def test_an_abort_in_the_middle_leaves_the_others_alone(self, make_engine, alone) -> None:
        engine = make_engine(max_num_sequences=8, max_model_length=128)
        first = engine.add_prompt(PROMPTS[4], MIXED[4])
        engine.add_prompt(PROMPTS[5], MIXED[5])
        engine.add_prompt(PROMPTS[1], MIXED[1])
        outputs = []
        for step in range(100):
            outputs += engine.step()[0]
            if step == 3:
                assert engine.abort(first)
        assert {tuple(it.token_ids) for it in outputs} >= {tuple(alone[5]), tuple(alone[1])}
        assert [it.finish_reason for it in outputs].count("abort") == 1
        assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]

    def test_samples_stand_each_in_a_place_of_its_own(self, engine: LLMEngine) -> None:
        params = replace(FORMS["regex"], n=6)
        (texts,) = engine.generate([PROMPT], params)["text"]
        assert len({*texts}) > 3
        for text in texts:
            assert_follows(params.structured_outputs, text, "stop")
        assert texts[0] == engine.generate([PROMPT], FORMS["regex"])["text"][0]

    def test_a_stop_string_ends_the_text_inside_its_form(self, engine: LLMEngine) -> None:
        result = engine.generate([PROMPT], replace(FORMS["regex"], stop="-"))
        assert re.fullmatch("[a-f]{3}", result["text"][0])
        assert result["stop_reason"] == ["-"]

    def test_log_probabilities_are_the_model_s_own(self, engine: LLMEngine) -> None:
        result = engine.generate([PROMPT], replace(FORMS["choice"], logprobs=2))
        entries = result["logprobs"][0]
        assert [entry.token_id for entry in entries] == result["token_ids"][0]
        assert any(entry.rank > 2 for entry in entries)  # the mask forbade likelier ones


def test_a_grammar_that_cannot_go_on_ends_its_request_alone(engine: LLMEngine, monkeypatch) -> None:
    make = engine._grammars.matcher

    def failing(params: SamplingParams):
        matcher = make(params)
        accept = matcher.accept
        matcher.accept = lambda tokens: accept(tokens) or ("too complex" if matcher.num_tokens == 3 else None)
        return matcher

    monkeypatch.setattr(engine._grammars, "matcher", lambda p: failing(p) if p.structured_outputs else None)
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (expected,) = engine.generate([PROMPT], plain)["token_ids"]
    result = engine.generate([PROMPT, PROMPT], [FORMS["regex"], plain])
    assert result["finish_reason"] == ["error", "length"]
    assert result["errors"] == ["too complex", None]
    assert result["token_ids"][1] == expected
    assert len(result["token_ids"][0]) == 3
    assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]


def test_a_grammar_that_fails_at_a_mask_ends_its_request_with_an_error(engine: LLMEngine, monkeypatch) -> None:
    """llguidance then allows nothing but the end, which is no end of the form."""
    make = engine._grammars.matcher

    def failing(params: SamplingParams):
        matcher = make(params)
        compute = matcher.mask

        def mask() -> bytes:
            if matcher.num_tokens == 3:
                matcher._matcher.consume_token(engine.tokenizer.convert_tokens_to_ids("!"))  # which does not fit
            return compute()

        matcher.mask = mask
        return matcher

    monkeypatch.setattr(engine._grammars, "matcher", failing)
    result = engine.generate([PROMPT], FORMS["regex"])
    assert result["finish_reason"] == ["error"]
    assert result["errors"][0].startswith("the grammar cannot go on behind token")
    assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]


@pytest.mark.parametrize("form", [{"json": {"$ref": "#"}}, {"grammar": "start: start"}])
def test_a_form_without_an_end_is_refused(engine: LLMEngine, form: dict) -> None:
    with pytest.raises(RequestError, match=r"prompt 1: .*cannot be followed: .") as caught:
        engine.generate([PROMPT, PROMPT], [SamplingParams(), following(**form)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "form", [{"regex": "a\ud800"}, {"grammar": 'start: "\ud800"'}, {"json": '{"const":"\\ud800"}'}]
)
def test_text_that_is_not_unicode_is_refused(engine: LLMEngine, form: dict) -> None:
    with pytest.raises(RequestError):
        engine.generate([PROMPT], following(**form))


def test_a_schema_too_deep_to_read_is_refused() -> None:
    with pytest.raises(RequestError, match="is not JSON that can be read"):
        StructuredOutputsParams(json='{"a":' * 100_000)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_bad_words_that_leave_nothing_end_the_request_with_an_error(engine: LLMEngine, temperature: float) -> None:
    params = replace(following(choice=["x7"]), temperature=temperature, bad_words=("7",))
    result = engine.generate([PROMPT], params)
    assert result["finish_reason"] == ["error"]
    assert result["errors"][0].startswith("the grammar cannot go on behind token 2")


def test_the_forward_pass_is_queued_before_the_tokens_of_the_last_step_are_read(engine: LLMEngine) -> None:
    """Steps with a grammar: forward, read, choose. All others: one call, and the reading behind it."""
    calls: list[str] = []
    runner = engine.runner
    steps, collect = runner._steps.decode, runner.collect

    def decode(num_rows: int, part: Part) -> None:
        calls.append(part.value)
        steps(num_rows, part)

    def reading() -> list[int]:
        calls.append("read")
        return collect()

    runner.graphs.forward, runner.collect = decode, reading
    engine.generate([PROMPT], following(choice=["abc"]))
    assert calls[:6] == ["forward", "read", "controlled end", "forward", "read", "controlled end"]
    calls.clear()
    engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert calls == ["plain", "read", "plain", "read", "plain", "read", "read"]
    calls.clear()
    engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, presence_penalty=1))
    assert calls == ["forward", "controlled end", "read", "forward", "controlled end", "read", "read"]


def test_whoever_schedules_on_their_own_follows_grammars_as_well(engine: LLMEngine, alone) -> None:
    params = FORMS["regex"]
    seq = Sequence(PROMPTS[5], params, block_size=16, matcher=engine._grammars.matcher(params))
    seq.block_table = [2, 4, 5, 6]
    for is_prefill in (True, *[False] * 40):
        seq.append_token(engine.runner.run([seq], is_prefill)[0])
        seq.matcher.accept(seq.token_ids[-1:])
        if seq.token_ids[-1] == EOS:
            break
    assert seq.completion_token_ids == alone[5]
    assert masks_of([seq])[0][0] == 0


def test_two_ranks_choose_alike(make_engine, llama: str) -> None:
    """Tokens of the upper half have their embeddings on the second rank, which has to know them."""
    limits = {"max_model_length": 128, "max_num_sequences": 8}
    bias = dict.fromkeys(range(256, 469), 6.0)
    upper = replace(following(regex="[a-z]*", seed=8), max_tokens=30, logit_bias=bias)
    params = [*MIXED[1:7], upper]
    expected = make_engine(**limits).generate(PROMPTS[1:8], params)["token_ids"]
    assert sum(token >= 256 for token in expected[-1]) > 10
    with LLMEngine(llama, world_size=2, device="cpu", block_size=16, **limits) as engine:
        assert engine.generate(PROMPTS[1:8], params)["token_ids"] == expected


def test_coroutines_follow_grammars(llama: str, alone) -> None:
    import asyncio

    async def ask(llm: AsyncLLMEngine, index: int) -> list[int]:
        return sum([piece.token_ids async for piece in llm.generate(PROMPTS[index], MIXED[index])], [])

    async def main() -> list[list[int]]:
        async with AsyncLLMEngine(llama, device="cpu", block_size=16, max_model_length=128) as llm:
            return await asyncio.gather(*(ask(llm, index) for index in range(len(MIXED))))

    assert asyncio.run(main()) == alone


def test_masks_of_rows_reach_their_rows(engine: LLMEngine) -> None:
    state = engine.runner.controls
    words = torch.arange(16, dtype=torch.int32)
    with torch.inference_mode():
        state.masks.fill_(-9)
        state.write_masks([(2, words.numpy().tobytes()), (0, (words + 5).numpy().tobytes())], None)
    assert torch.equal(state.masks[2], words)
    assert torch.equal(state.masks[0], words + 5)
    assert (state.masks[[1, 3]] == -9).all()
