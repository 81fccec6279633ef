"""What a command prints of the answers to one prompt: text as it comes, log probabilities, JSON."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tritonllm.cli.terminal import print_json, say
from tritonllm.errors import EngineError
from tritonllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tritonllm.engine.llm_engine import LLMEngine
    from tritonllm.engine.logprobs import TokenLogprobs
    from tritonllm.engine.outputs import StreamOutput


@dataclasses.dataclass
class Answer:
    """The pieces of one completion put together; the fields are those of `LLMEngine.generate`."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def add(self, piece: StreamOutput) -> None:
        """Take in the next piece."""
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.finish_reason, self.stop_reason, self.error = piece.finish_reason, piece.stop_reason, piece.error
        if piece.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *piece.logprobs]
        self.prompt_logprobs = piece.prompt_logprobs or self.prompt_logprobs


def print_answers(
    llm: LLMEngine,
    prompt_ids: list[int],
    params: SamplingParams,
    stats: bool,
    stopped: Callable[[], bool] = lambda: False,
    *,
    stream: bool = True,
    as_json: bool = False,
) -> str:
    """Complete one prompt until it ends or `stopped()`, print its answers, and return the text of the first.

    Text goes to standard output: of one answer as it comes or at once, of several once all are there. Log probabilities
    and statistics go to standard error. JSON has all but the statistics, on standard output.

    Raises:
        EngineError: an answer broke off; what there is of it is printed.
    """
    stream = stream and params.n == 1 and not as_json
    answers = [Answer() for _ in range(params.n)]
    start = first = time.perf_counter()
    for piece in llm.stream(prompt_ids, params):
        if not any(answer.token_ids for answer in answers):
            first = time.perf_counter()
        answers[piece.sample].add(piece)
        if stream:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        if stopped():
            break
    seconds = time.perf_counter() - first
    if as_json:
        print_json(_as_json(answers, len(prompt_ids)))
    else:
        _print_text(llm.tokenizer, answers, stream)
    for answer in answers:
        if answer.error is not None:
            raise EngineError(f"the answer broke off: {answer.error}.")
    if stats:
        num_tokens = sum(len(answer.token_ids) for answer in answers)
        # The prompt's step yields the first token, so the others share the time after it.
        rate = f", {(num_tokens - 1) / seconds:.1f} tokens/s" if num_tokens > 1 else ""
        reasons = ", ".join(answer.finish_reason or "stopped by Ctrl-C" for answer in answers)
        say(f"prompt: {len(prompt_ids)} tokens, prefill {first - start:.3f} s (until the first token)")
        say(f"output: {num_tokens} tokens{rate}, finish reason: {reasons}")
    return answers[0].text


def _print_text(tokenizer: Any, answers: list[Answer], streamed: bool) -> None:
    if answers[0].prompt_logprobs is not None:
        _say_logprobs(tokenizer, "prompt", answers[0].prompt_logprobs[1:])
    for number, answer in enumerate(answers, 1):
        heading = f"[{number}/{len(answers)}]\n" if len(answers) > 1 else ""
        sys.stdout.write("\n" if streamed else f"{heading}{answer.text}\n")
        sys.stdout.flush()
        if answer.logprobs is not None:
            _say_logprobs(tokenizer, "output", answer.logprobs)


def _say_logprobs(tokenizer: Any, what: str, entries: Iterable[TokenLogprobs | None]) -> None:
    """A line for each token: its log probability, its rank, itself, and the likeliest."""

    def named(token_id: int) -> str:
        return str(token_id) if tokenizer is None else repr(tokenizer.decode([token_id]))

    say(f"log probabilities of the {what}: logprob, rank, token, likeliest")
    for entry in entries:
        if entry is not None:
            likeliest = "".join(f"  {named(token_id)} {logprob:.3f}" for token_id, logprob in entry.top)
            say(f"{entry.logprob:9.3f} {entry.rank:6}  {named(entry.token_id)}{likeliest and f' {likeliest}'}")


def _as_json(answers: list[Answer], num_prompt_tokens: int) -> dict[str, Any]:
    """What `LLMEngine.generate` says of one prompt: of several answers each field but usage and the prompt's is a list.

    Entries of log probabilities are objects with the names of their attributes.
    """
    fields: dict[str, Any] = {}
    for name in ("text", "token_ids", "finish_reason", "stop_reason", "error", "logprobs"):
        values = [_plain(getattr(answer, name)) for answer in answers]
        fields[name] = values[0] if len(values) == 1 else values
    fields["prompt_logprobs"] = _plain(answers[0].prompt_logprobs)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    fields["usage"] = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens}
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [entry._asdict() if hasattr(entry, "_asdict") else entry for entry in value]
    return value
