"""Faults of text, samples and coroutines."""

from __future__ import annotations

from mutant import Mutant

STOP = ("tests/unit/test_stop_strings.py",)
TEXT = ("tests/unit/test_detokenizer.py",)
SAMPLES = ("tests/unit/test_samples.py",)
FORMS = ("tests/unit/test_structured_outputs.py",)
COROUTINES = ("tests/unit/test_async_engine.py",)
BAD_WORDS = ("tests/unit/test_bad_words.py",)
CONTROLS = ("tests/unit/test_controls.py",)

_STOP = "tritonllm.engine.stop_strings"
_TEXT = "tritonllm.engine.detokenizer"
_COMPLETION = "tritonllm.engine.completion"
_SCHEDULER = "tritonllm.engine.scheduler"
_THREAD = "tritonllm.engine.engine_thread"
_GRAMMARS = "tritonllm.engine.grammars"
_MAILBOX = "tritonllm.engine.mailbox"

GENERATION_MUTANTS = (
    Mutant("nothing is held back for a stop string", _STOP, "len(text) - self._num_open(text)", "len(text)", STOP),
    Mutant("what was held back is lost at the end", _STOP, "len(text) if last else", "", STOP),
    Mutant("the stop string that begins first counts", _STOP, "+ len(stop), -len(stop)", ", -len(stop)", STOP),
    Mutant(
        "stop strings are looked for when the stream is read",
        "tritonllm.engine.step_loop",
        "finished += self._stop_at_strings()",
        "pass",
        STOP,
    ),
    Mutant(
        "a length limit hides a stop string",
        _SCHEDULER,
        "self.abort(seq)\n        seq.finish_reason, seq.stop_reason",
        "if not self.abort(seq):\n            return\n        seq.finish_reason, seq.stop_reason",
        STOP,
    ),
    Mutant("the text has the token that stopped it", _COMPLETION, "stop -= 1", "pass", STOP),
    Mutant("half a character goes out", _TEXT, "if text.endswith(REPLACEMENT) and", "if False and", TEXT),
    Mutant("bytes without end are held for ever", _TEXT, "< _MAX_HELD", "< 10**9", TEXT),
    Mutant(
        "the window begins in the middle",
        _TEXT,
        "del self._window[: self._num_shown]\n                text",
        "text",
        TEXT,
    ),
    Mutant(
        "spaces are cleaned up", _TEXT, "clean_up_tokenization_spaces=False", "clean_up_tokenization_spaces=None", TEXT
    ),
    Mutant("all samples draw the same noise", "tritonllm.engine.samples", "sample_seed(own, i)", "own", SAMPLES),
    Mutant(
        "other samples wait until the steady batch ends",
        _SCHEDULER,
        "appendleft(sample)\n            self._steady = None",
        "appendleft(sample)",
        SAMPLES,
    ),
    Mutant("other samples go to the end of the queue", _SCHEDULER, "appendleft(sample)", "append(sample)", SAMPLES),
    Mutant(
        "other samples do not outlive the first",
        _SCHEDULER,
        "self._release_samples(seq)\n        self._steady",
        "self._steady",
        SAMPLES,
    ),
    Mutant(
        "a request that is left goes on", _THREAD, "self._engine.scheduler.abort(completion.seq)", "pass", COROUTINES
    ),
    Mutant("nobody wakes the thread for those who wait", _THREAD, "bool(self._backlog) or not", "not", COROUTINES),
    Mutant("there is no limit on requests", _THREAD, "len(self._live) < self._max_requests", "True", COROUTINES),
    Mutant(
        "a slow consumer gets the newest piece alone",
        _MAILBOX,
        "self._pieces += pieces",
        "self._pieces = pieces",
        COROUTINES,
    ),
    Mutant(
        "a bad word begins in the prompt",
        "tritonllm.engine.sequence",
        "ring_of(self.token_ids, self.num_prompt_tokens, stop)",
        "ring_of(self.token_ids, 0, stop)",
        BAD_WORDS,
    ),
    Mutant(
        "a row that is written misses a token of its output",
        "tritonllm.engine.plan",
        "recent=seq.recent(seq.length - 1)",
        "recent=seq.recent(seq.length - 2)",
        BAD_WORDS,
    ),
    Mutant(
        "a prompt that was preempted misses a token of its output",
        "tritonllm.engine.plan",
        "recent=seq.recent(stop) if",
        "recent=seq.recent(stop - 1) if",
        BAD_WORDS,
    ),
    Mutant(
        "later samples may say bad words",
        "tritonllm.engine.samples",
        "bad_words=bad_words, matcher",
        "bad_words=bad_words if own_params is params else (), matcher",
        BAD_WORDS,
    ),
    Mutant(
        "bad words may be all that is allowed",
        "tritonllm.engine.controls",
        "if bad_words and params.allowed_token_ids",
        "if False and params.allowed_token_ids",
        BAD_WORDS,
    ),
    Mutant("a piece has all log probabilities", _COMPLETION, "self._logprobs[new]", "self._logprobs", CONTROLS),
    Mutant("every piece has those of the prompt", _COMPLETION, "if is_first else None", "if True else None", CONTROLS),
    Mutant(
        "joined pieces have the log probabilities of the last",
        _MAILBOX,
        "for piece in pieces for entry in piece.logprobs or ()",
        "for piece in pieces[-1:] for entry in piece.logprobs or ()",
        COROUTINES,
    ),
    Mutant("a failure reaches those who run alone", _THREAD, "*self._backlog, *self._arrived]", "]", COROUTINES),
    Mutant("samples share where their grammar stands", _GRAMMARS, "start.deep_copy()", "start", FORMS),
    Mutant("a mask has ids that the model lacks", _GRAMMARS, " & self._vocabulary", "", FORMS),
    Mutant(
        "a stop token within a form lets its end in",
        _GRAMMARS,
        "(allowed & self._complete)",
        "(allowed & self._ends)",
        FORMS,
    ),
    Mutant("the end is allowed before min_tokens", _GRAMMARS, "allowed & ~self._ends", "allowed", FORMS),
    Mutant("min_tokens leaves nothing allowed", _GRAMMARS, "longer if longer.any() else allowed", "longer", FORMS),
    Mutant("a grammar's error is not looked for", _GRAMMARS, "return self.error", "return None", FORMS),
    Mutant(
        "an end that a failed grammar leaves is its end",
        "tritonllm.engine.scheduler",
        "if seq.matcher is not None and seq.matcher.error:",
        "if False:",
        FORMS,
    ),
    Mutant(
        "a prompt's first token has no mask",
        "tritonllm.engine.inputs",
        "chunk.recent, chunk.mask)",
        "chunk.recent)",
        FORMS,
    ),
    Mutant(
        "masks are computed before the last token is read",
        "tritonllm.engine.in_flight",
        "for seq in self.with_grammar:",
        "for seq in ():",
        FORMS,
    ),
    Mutant(
        "a steady batch does not wait for masks",
        "tritonllm.engine.steady_batch",
        "waits_for_masks=bool(self.in_flight.with_grammar)",
        "waits_for_masks=False",
        FORMS,
    ),
    Mutant(
        "masks reach the rows in another order",
        "tritonllm.engine.control_state",
        "[*words, np.array(rows",
        "[*words[::-1], np.array(rows",
        FORMS,
    ),
    Mutant(
        "the other ranks choose without masks",
        "tritonllm.engine.step_loop",
        'self.runner.call("choose", self',
        'self.runner.ranks and self.runner.ranks.publish("choose", ([],)), self.runner.choose(self',
        FORMS,
    ),
    Mutant(
        "a grammar that cannot go on goes on",
        _SCHEDULER,
        'self._finish(seq, "error", error)\n        return',
        "pass\n        return",
        FORMS,
    ),
)
