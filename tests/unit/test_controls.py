"""Penalties, biases, masks and log probabilities of requests, against the same tokens computed step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tritonllm import LLMEngine, SamplingParams
from tritonllm.engine.control_state import ControlledRow, ControlState, count_words, mask_words
from tritonllm.engine.controls import MAX_BIASES, RowControls, controls_of
from tritonllm.engine.sequence import Sequence
from tritonllm.errors import RequestError
from tritonllm.kernels.reference.sampling import gumbel_noise
from tritonllm.testing.sampling_rows import kept_by_sort

PROMPT = [7, 3, 3, 11, 5, 9, 9, 9, 2, 40]
SEED = 11
CPU = torch.device("cpu")


@pytest.fixture
def engine(make_engine) -> LLMEngine:
    return make_engine(max_num_sequences=4, max_model_length=96)


def all_logits(engine: LLMEngine, tokens: list[int]) -> torch.Tensor:
    """Logits [V] behind these tokens, from one prefill of them."""
    seq = Sequence(tokens, block_size=engine.config.block_size)
    seq.block_table = list(range(seq.num_blocks))
    runner = engine.runner
    return runner.run_model(runner.prepare_prefill([seq]), is_prefill=True)[0].float()


def adjusted(x: torch.Tensor, output: list[int], params: SamplingParams, ends: set[int]) -> torch.Tensor:
    """Logits behind PROMPT and an output by the definitions of the fields, one token at a time."""
    x = x.double().clone()
    for token, bias in dict(params.logit_bias).items():
        x[token] += bias
    for token in {*PROMPT, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in {*output}:
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.allowed_token_ids is not None:
        forbidden = [token for token in range(len(x)) if token not in params.allowed_token_ids]
        x[forbidden] = -torch.inf
    if len(output) < params.min_tokens:
        x[list(ends)] = -torch.inf
    return x


def expected(engine: LLMEngine, params: SamplingParams, num_tokens: int) -> list[int]:
    """The completion of PROMPT, every token from a prefill of all before it."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else engine.model_config.eos_token_ids)}
    output: list[int] = []
    while len(output) < num_tokens:
        tokens = PROMPT + output
        x = adjusted(all_logits(engine, tokens), output, params, ends)
        if params.temperature:
            kept = kept_by_sort(x, params.temperature, params.top_k, params.top_p, params.min_p)
            seeds = torch.tensor([[params.seed, 0]], dtype=torch.int32)
            noise = gumbel_noise(seeds, torch.tensor([len(tokens)], dtype=torch.int32), len(x))[0]
            x = torch.where(kept, x + params.temperature * noise, -torch.inf)
        output.append(int(x.argmax()))
        if output[-1] in ends:
            break
    return output


FIELDS = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -1.0},
    {"logit_bias": {3: 6.0, 9: -100.0, 11: 0.0}},
    {"allowed_token_ids": [1, 3, 9, 44, 95]},
    {"min_p": 0.3},
    {"min_p": 0.05, "top_k": 30, "top_p": 0.8},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {t: 2.0 for t in range(30, 60)},
        "allowed_token_ids": list(range(20, 80)),
        "min_p": 0.02,
        "top_p": 0.95,
    },
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_those_of_the_definitions(engine: LLMEngine, fields: dict, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=SEED, max_tokens=14, ignore_eos=True, **fields)
    assert engine.generate([PROMPT], params)["token_ids"] == [expected(engine, params, 14)]


@pytest.mark.parametrize("min_tokens", [1, 4, 9])
def test_no_end_before_the_least_number_of_tokens(engine: LLMEngine, min_tokens: int) -> None:
    """Ends are made so likely that the text ends as soon as it may, with both kinds of them."""
    (eos,) = engine.model_config.eos_token_ids
    bias = {eos: 50.0, 17: 60.0}
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=min_tokens, stop_token_ids=(17,), logit_bias=bias)
    (tokens,) = engine.generate([PROMPT], params)["token_ids"]
    assert len(tokens) == min_tokens + 1
    assert tokens[-1] == 17
    assert not {eos, 17} & {*tokens[:-1]}
    assert tokens == expected(engine, params, 20)


def test_rows_without_controls_are_as_they_are_alone(engine: LLMEngine) -> None:
    """Greedy, plain and filtered rows beside rows with controls, in one batch."""
    others = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, top_p=0.7, top_k=20, max_tokens=12, ignore_eos=True),
    ]
    alone = [engine.generate([PROMPT], params)["token_ids"][0] for params in others]
    controlled = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True, **FIELDS[-1])
    together = engine.generate([PROMPT] * 4, [others[0], controlled, *others[1:]])["token_ids"]
    assert [together[0], *together[2:]] == alone


def test_rows_written_anew_at_every_step_count_each_token_once(engine: LLMEngine) -> None:
    """Whoever schedules on their own writes a row whole, its newest token read."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, frequency_penalty=2, repetition_penalty=1.3)
    seq = Sequence(PROMPT, params, block_size=engine.config.block_size)
    seq.block_table = [2, 4]
    seq.append_token(engine.runner.run([seq], is_prefill=True)[0])
    while seq.num_completion_tokens < 9:
        token = engine.runner.run([seq], is_prefill=False)[0]
        assert int((engine.runner.controls.counts[0] & 0x7FFF).sum()) == seq.num_completion_tokens
        seq.append_token(token)
    assert seq.completion_token_ids == expected(engine, params, 9)


class TestLogprobs:
    @pytest.fixture
    def result(self, engine: LLMEngine) -> dict:
        params = SamplingParams(temperature=0.9, top_k=40, seed=2, max_tokens=9, ignore_eos=True, logprobs=5)
        return engine.generate([PROMPT] * 2, [params, SamplingParams(max_tokens=3, ignore_eos=True)])

    def test_one_entry_a_token_with_the_model_s_own_probabilities(self, engine: LLMEngine, result: dict) -> None:
        entries, tokens = result["logprobs"][0], result["token_ids"][0]
        assert [entry.token_id for entry in entries] == tokens
        assert len(entries) == 9
        for step, entry in enumerate(entries):
            exact = all_logits(engine, PROMPT + tokens[:step]).double().log_softmax(0)
            order = exact.sort(descending=True, stable=True).indices[:5].tolist()
            assert [token for token, _ in entry.top] == order
            assert entry.rank == 1 + int((exact > exact[entry.token_id]).sum())
            values = torch.tensor([entry.logprob, *(value for _, value in entry.top)], dtype=torch.float64)
            torch.testing.assert_close(values, exact[[entry.token_id, *order]], rtol=1e-5, atol=1e-5)

    def test_who_did_not_ask_gets_none(self, result: dict) -> None:
        assert result["logprobs"][1] is None

    def test_neither_a_prefix_hit_nor_a_preemption_changes_them(self, make_engine) -> None:
        """Entries of a request that was preempted and of one that found its prompt in the cache."""
        params = SamplingParams(temperature=0.7, seed=5, max_tokens=30, ignore_eos=True, logprobs=3, presence_penalty=1)
        prompts = [[*PROMPT, *PROMPT, index] for index in range(3)]
        roomy = make_engine(max_num_sequences=3, max_model_length=96).generate(prompts, params)
        tight = make_engine(max_num_sequences=3, max_model_length=96, max_cached_blocks=7)
        for _ in range(2):
            result = tight.generate(prompts, params)
            assert result["token_ids"] == roomy["token_ids"]
            for ours, theirs in zip(result["logprobs"], roomy["logprobs"], strict=True):
                assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
                for one, other in zip(ours, theirs, strict=True):
                    assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert tight.stats()["preemptions"] > 0

    def test_the_surplus_behind_an_end_has_no_entry(self, engine: LLMEngine) -> None:
        params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(17,), logit_bias={17: 80}, logprobs=0)
        result = engine.generate([PROMPT], params)
        assert result["token_ids"] == [[17]]
        assert [(entry.token_id, entry.top) for entry in result["logprobs"][0]] == [(17, [])]

    def test_pieces_of_a_stream_joined_have_those_of_generate(self, make_engine) -> None:
        """Also of a text that a stop string or a token ends, of several samples, and of one that was preempted."""
        base = {"temperature": 0.9, "ignore_eos": True, "max_tokens": 30}
        params = [
            SamplingParams(**base, seed=1, logprobs=3, prompt_logprobs=2),
            SamplingParams(**base, seed=2, logprobs=0, n=2),
            SamplingParams(**base, seed=3, logprobs=1, stop=tuple("aeiou")),
            SamplingParams(**base, seed=4),
        ]
        prompts = [[*PROMPT, *PROMPT, index] for index in range(4)]
        keys = {"max_num_sequences": 4, "max_cached_blocks": 9}
        whole = make_engine(**keys).generate(prompts, params)
        assert whole["finish_reason"][2] == "stop"
        engine = make_engine(**keys)
        entries: dict[tuple[int, int], list] = {}
        about_prompts = []
        for piece in engine.stream(prompts, params):
            own = entries.setdefault((piece.index, piece.sample), [])
            if piece.index == 3:
                assert piece.logprobs is None
            else:
                assert [entry.token_id for entry in piece.logprobs] == piece.token_ids
                own += piece.logprobs
            about_prompts += [(piece.index, piece.prompt_logprobs)] if piece.prompt_logprobs is not None else []
        assert engine.stats()["preemptions"] > 0
        assert entries == {
            (0, 0): whole["logprobs"][0],
            (1, 0): whole["logprobs"][1][0],
            (1, 1): whole["logprobs"][1][1],
            (2, 0): whole["logprobs"][2],
            (3, 0): [],
        }
        assert about_prompts == [(0, whole["prompt_logprobs"][0])]

    def test_step_reports_them_as_well(self, engine: LLMEngine) -> None:
        engine.add_prompt(PROMPT, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1))
        outputs = []
        while not engine.scheduler.is_finished():
            outputs += engine.step()[0]
        assert [entry.token_id for entry in outputs[0].logprobs] == outputs[0].token_ids


class TestPromptLogprobs:
    @pytest.mark.parametrize("budget", [7, 512])
    def test_every_token_but_the_first_has_an_entry(self, make_engine, budget: int) -> None:
        """Whole, in chunks, twice so that the cache holds the prompt, and beside a request that wants none."""
        engine = make_engine(max_num_sequences=4, max_model_length=96, max_num_batched_tokens=budget)
        prompt = PROMPT * 4
        exact = [all_logits(engine, prompt[:length]).double().log_softmax(0) for length in range(1, len(prompt))]
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
        plain = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        for _ in range(2):
            result = engine.generate([prompt, prompt], [params, plain])
            assert result["token_ids"][0] == result["token_ids"][1]
            assert result["usage"][0]["cached_tokens"] == 0
            assert result["prompt_logprobs"][1] is None
            first, *entries = result["prompt_logprobs"][0]
            assert first is None
            assert [entry.token_id for entry in entries] == prompt[1:]
            for entry, logprobs in zip(entries, exact, strict=True):
                order = logprobs.sort(descending=True, stable=True).indices[:2].tolist()
                assert [token for token, _ in entry.top] == order
                assert entry.rank == 1 + int((logprobs > logprobs[entry.token_id]).sum())
                values = torch.tensor([entry.logprob, *(value for _, value in entry.top)], dtype=torch.float64)
                torch.testing.assert_close(values, logprobs[[entry.token_id, *order]], rtol=1e-5, atol=1e-5)
        assert result["usage"][1]["cached_tokens"] > 0

    def test_a_preempted_prompt_has_each_entry_once(self, make_engine) -> None:
        prompts = [[*PROMPT, *PROMPT, index] for index in range(3)]
        params = SamplingParams(temperature=0.7, seed=5, max_tokens=30, ignore_eos=True, prompt_logprobs=1, logprobs=0)
        roomy = make_engine(max_num_sequences=3, max_model_length=96).generate(prompts, params)
        tight = make_engine(max_num_sequences=3, max_model_length=96, max_cached_blocks=7, max_num_batched_tokens=16)
        result = tight.generate(prompts, params)
        assert tight.stats()["preemptions"] > 0
        assert result["token_ids"] == roomy["token_ids"]
        for ours, theirs in zip(result["prompt_logprobs"], roomy["prompt_logprobs"], strict=True):
            assert [entry and entry.token_id for entry in ours] == [entry and entry.token_id for entry in theirs]
            for one, other in zip(ours[1:], theirs[1:], strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)

    def test_a_prompt_of_one_token_has_none(self, engine: LLMEngine) -> None:
        result = engine.generate([[5]], SamplingParams(max_tokens=2, prompt_logprobs=3))
        assert result["prompt_logprobs"] == [[None]]

    def test_scores_are_the_log_probabilities_of_the_continuations(self, engine: LLMEngine) -> None:
        scores = engine.score([PROMPT, [5]], [[8, 9, 10], [7]])
        assert [[entry.token_id for entry in entries] for entries in scores] == [[8, 9, 10], [7]]
        for step, entry in enumerate(scores[0]):
            exact = all_logits(engine, [*PROMPT, 8, 9, 10][: len(PROMPT) + step]).double().log_softmax(0)
            assert entry.logprob == pytest.approx(exact[entry.token_id].item(), abs=1e-5)
        assert engine.score(PROMPT, [8, 9, 10]) == scores[:1]
        (best,) = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))["token_ids"]
        assert [entry.rank for entry in engine.score([PROMPT], [best])[0]] == [1, 1, 1]

    @pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
    def test_continuations_of_any_kind(self, engine: LLMEngine, kind) -> None:
        expected = engine.score([PROMPT, PROMPT], [[0], [5, 6]])
        assert engine.score([kind(PROMPT)] * 2, [kind([0]), kind([5, 6])]) == expected

    @pytest.mark.parametrize(
        ("continuations", "message"),
        [
            ([[1], [2]], "1 prompts but 2 continuations"),
            ([[]], r"continuation 0 is \[\]"),
            (["text"], "continuation 0 is 'text'; give at least one token id"),
            ([[512]], "prompt 0 or its continuation: token id 512"),
            ([[1] * 86], "prompt 0: the prompt has 96 tokens and leaves no room"),
        ],
    )
    def test_wrong_continuations_are_refused(self, engine: LLMEngine, continuations: list, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            engine.score([PROMPT], continuations)


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"logit_bias": {5: 1, 512: 2}}, "logit_bias names token 512, but the model's vocabulary ends at 511"),
            ({"allowed_token_ids": (3, 10**6)}, "allowed_token_ids names token 1000000"),
            ({"stop_token_ids": (512,)}, "stop_token_ids names token 512"),
            ({"min_tokens": 1, "stop_token_ids": (3,), "allowed_token_ids": (3,)}, "all end the text"),
        ],
    )
    def test_what_does_not_fit_the_model_is_refused_before_anything_is_queued(
        self, engine: LLMEngine, fields: dict, message: str
    ) -> None:
        assert engine.model_config.vocab_size == 512
        with pytest.raises(RequestError, match=f"prompt 1: .*{message}"):
            engine.generate([PROMPT] * 2, [SamplingParams(), SamplingParams(**fields)])
        assert engine.scheduler.is_finished()
        assert engine.stats()["requests"] == 0

    def test_a_list_of_biases_has_an_end(self, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tritonllm.engine.controls.MAX_BIASES", 3)
        fits = SamplingParams(logit_bias={1: 1, 3: 1}, stop_token_ids=(3, 4), min_tokens=1, ignore_eos=True)
        assert len(controls_of(fits, 5, fits.stop_token_ids).biases) == 3
        engine.generate([PROMPT], fits)
        with pytest.raises(RequestError, match="are 4 tokens together; give at most 3"):
            engine.generate([PROMPT], SamplingParams(logit_bias=dict.fromkeys(range(4), 1.0)))


def test_words_count_the_output_and_mark_the_prompt() -> None:
    tokens, words = count_words([5, 5, 2], [5, 7, 7, 7])
    assert tokens.tolist() == [2, 5, 7]
    assert words.tolist() == [-(2**15), 1 - 2**15, 3]
    tokens, words = count_words([1], [1, 4] * 40_000)
    assert words.tolist() == [-1, 32767]
    assert [part.tolist() for part in count_words([], [])] == [[], []]


def test_mask_words_have_the_lowest_bit_first() -> None:
    assert mask_words((0, 33, 63), 3).tolist() == [1, 2 - 2**31, 0]
    assert mask_words((31, 31), 1).dtype == np.int32


def test_writing_a_row_leaves_nothing_of_its_last_tenant_and_others_alone() -> None:
    state = ControlState.allocate(3, 40, CPU)
    first = RowControls(0, 2, 0, 0, ((3, 1.5, 0), (4, -1.0, 7)), (1, 2), -1)
    second = first._replace(biases=((9, 0.5, 0),), allowed_token_ids=(39,))
    state.write([ControlledRow(0, first, ([1, 2], [3])), ControlledRow(2, first, ([1], [1, 1]))])
    before = [part.clone() for part in vars(state).values()]
    state.write([ControlledRow(2, second, ([], [7]))])
    for part, old in zip(vars(state).values(), before, strict=True):
        assert torch.equal(part[:2], old[:2])
    assert state.counts[2].nonzero()[:, 0].tolist() == [7]
    assert state.masks[2].tolist() == [0, 1 << 7]
    assert state.biases[2, 0].tolist() == [9, 0x3F000000, 0]
    assert state.biases.shape == (3, MAX_BIASES, 3)
