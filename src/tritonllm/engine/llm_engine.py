"""The engine that a user holds: prompts in, tokens and text out."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from collections.abc import Sequence as ListOf
from types import TracebackType
from typing import Any

from tritonllm.config import EngineConfig
from tritonllm.engine.bad_words import tokenize_bad_words
from tritonllm.engine.completion import Completion
from tritonllm.engine.controls import check_controls
from tritonllm.engine.grammars import Grammars
from tritonllm.engine.launch_place import launch_place
from tritonllm.engine.logprobs import TokenLogprobs
from tritonllm.engine.model_runner import ModelRunner
from tritonllm.engine.outputs import RequestOutput, StreamOutput, as_result
from tritonllm.engine.progress import show_progress
from tritonllm.engine.prompts import Prompt, Request, as_continued, as_params_list, as_requests, tokenize, tokenize_chat
from tritonllm.engine.resolve import resolve_model
from tritonllm.engine.samples import samples_of
from tritonllm.engine.scheduler import Scheduler
from tritonllm.engine.step_loop import StepLoop
from tritonllm.errors import EngineError, RequestError
from tritonllm.hookspecs import ModelSpec
from tritonllm.sampling_params import SamplingParams

logger = logging.getLogger("tritonllm")


class LLMEngine:
    """Serves one checkpoint.

    Args:
        config: a dict of configuration keys, an `EngineConfig`, or a model name or path.
        spec: the model family to use, whatever the checkpoint's name and architecture; None looks it up.
        keys: configuration keys, beside a name or path.

    If a dict is given, the number of cache blocks in effect is written into its `max_cached_blocks`.

    One thread at a time: while a thread is in a method, which for `generate` is its whole run and for `stream` each
    piece, calls from others raise EngineError and change nothing; only `stats` may be called from anywhere. In asyncio,
    `await asyncio.to_thread(engine.generate, ...)`, one at a time.

    Ctrl-C waits for the end of the step under way and then raises KeyboardInterrupt; `generate` and `stream` abort
    their requests first, and the engine can be used on. After an exception inside a step it cannot: every later call
    raises EngineError with the first error, and only `exit` is left.

    A `world_size` above 1 spawns processes that import the script again: make the engine under
    `if __name__ == "__main__":`. Under torchrun, on one host or on several, it takes the processes that are there: on
    rank 0 this is the engine, on the others the call serves rank 0 and then raises SystemExit.

    Attributes:
        config: the configuration in effect, frozen.
        tokenizer: the checkpoint's, None for dummy weights.
        generation_config: the checkpoint's generation_config.json, empty if it has none; see
            `SamplingParams.from_checkpoint`.
        scheduler, runner: the two halves below.

    Raises:
        ConfigError: a key or value is wrong or contradicts the checkpoint.
        CheckpointError: the checkpoint is missing or incomplete.
        UnknownModelError: no model family serves it.
        PluginError: the family's class cannot be imported.
        EngineError: a rank of several failed; with its traceback, and nothing is left of any.
    """

    def __init__(
        self, config: Mapping[str, Any] | EngineConfig | str, *, spec: ModelSpec | None = None, **keys: Any
    ) -> None:
        engine_config = _engine_config(config, keys)
        place = launch_place(engine_config.world_size)
        if place is not None and place.rank:
            from tritonllm.engine.launched_ranks import serve_launched_rank

            serve_launched_rank(place)
        resolved = resolve_model(engine_config, spec=spec)
        self.tokenizer = resolved.tokenizer
        self.model_config = resolved.config
        self.generation_config = dict(resolved.checkpoint.generation_config) if resolved.checkpoint else {}
        self.runner = ModelRunner(engine_config, resolved=resolved)
        # At interpreter exit, or when the engine is collected, whichever comes first.
        self._finalizer = weakref.finalize(self, self.runner.call, "exit")
        self.config = resolved.engine.replace(max_cached_blocks=self.runner.num_blocks)
        if isinstance(config, MutableMapping):
            config["max_cached_blocks"] = self.runner.num_blocks
        pool = self.runner.num_blocks * self.config.block_size
        if pool < (self.config.max_model_length or 0):
            logger.warning(
                "the KV cache holds %d tokens, so requests end there and not at max_model_length = %d",
                pool,
                self.config.max_model_length,
            )
        limits = self.config.max_num_sequences, self.config.max_num_batched_tokens
        blocks = self.runner.num_blocks, self.config.block_size
        lengths = self.config.max_model_length, self.config.max_prefill_tokens_beside_decode
        self.scheduler = Scheduler(*limits, *blocks, resolved.config.eos_token_ids, *lengths)
        self._grammars = Grammars(self.tokenizer, self.model_config.vocab_size, self.model_config.eos_token_ids)
        self._loop = StepLoop(self.scheduler, self.runner)
        self._num_requests = 0

    # ---- requests ----

    def add_prompt(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt, a string or token ids, and return its seq_id.

        Raises:
            RequestError: it can never be served; nothing was queued.
            EngineError: the engine was closed, has failed, or is in use by another thread; so for every method.
            KeyboardInterrupt: nothing was queued.
        """
        loop = self._loop
        completions: list[Completion] = []
        try:
            with loop.guard.turn():
                loop.require_usable()
                (params,) = as_params_list(sampling_params, 1)
                completions = self.queue_prompt(prompt, params)
                loop.requests.update((completion.seq.seq_id, completion) for completion in completions)
                return completions[0].request_id
        except KeyboardInterrupt:
            for completion in completions:
                loop.requests.pop(completion.seq.seq_id, None)
            loop.abandon([completion.seq for completion in completions])
            raise

    def abort(self, seq_id: int) -> bool:
        """End a request; the next `step()` reports it with finish reason "abort".

        Returns:
            False if there is no unfinished request of that id.
        """
        with self._loop.guard.turn():
            self._loop.require_usable(closed_too=True)
            samples = [it.seq for it in self._loop.requests.values() if it.request_id == seq_id]
            return any([self.scheduler.abort(seq) for seq in samples])

    def step(self) -> tuple[list[RequestOutput], int, bool]:
        """Launch the next step, if there is work, and read the step before it.

        Returns:
            The requests found finished, each once; the tokens of the step launched; whether it held prompt tokens.

        Raises:
            EngineError: as the class says.
            KeyboardInterrupt: after the step; what it found finished is returned by the next call.
        """
        loop = self._loop
        finished: list[Completion] = []
        try:
            with loop.guard.turn():
                sequences, num_tokens, is_prefill = loop.advance()
                finished = [loop.requests.pop(seq.seq_id) for seq in sequences]
                return [completion.output() for completion in finished], num_tokens, is_prefill
        except KeyboardInterrupt:
            loop.requests.update((completion.seq.seq_id, completion) for completion in finished)
            self.scheduler.keep_finished([completion.seq for completion in finished])
            raise

    def generate(
        self,
        prompts: Prompt | ListOf[Prompt],
        sampling_params: SamplingParams | ListOf[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> dict[str, list[Any]]:
        """Complete prompts and wait for all of them; requests already in the engine go on beside them.

        Args:
            prompts: strings or lists of token ids, or one of them.
            sampling_params: one for all prompts, or one for each.
            use_tqdm: show a progress bar on standard error, with tokens per second.

        Returns:
            Lists in the order of the prompts: `text`, `token_ids`, `finish_reason` ("stop", "length", "abort" or
            "error"), `stop_reason` (the token id or stop string that stopped it, else None), `usage` (token counts),
            `errors` (None, or why that request failed), and `logprobs` and `prompt_logprobs` (None, or a
            `TokenLogprobs` for each token, where `SamplingParams` asks for them). With `SamplingParams.n` above 1 an
            entry is the list of that prompt's completions, but for `usage` and `prompt_logprobs`.

        Raises:
            RequestError: an argument is bad; names the index of the prompt, and no prompt of the call was queued.
        """
        with self._loop.guard.turn():
            requests = self._check_all(prompts, sampling_params)
            with self._loop.queued(lambda: self._queue_all(requests)) as completions:
                steps = self._loop.steps_until_finished(completions)
                if use_tqdm:
                    show_progress(steps, completions)
                else:
                    for _ in steps:
                        pass
            outputs: list[list[RequestOutput]] = [[] for _ in requests]
            for completion in completions:
                outputs[completion.index].append(completion.output())
            return as_result(outputs)

    def score(self, prompts: Prompt | ListOf[Prompt], continuations: ListOf[Any]) -> list[list[TokenLogprobs]]:
        """Log probabilities of given continuations under the model, computed as prompts are.

        Args:
            prompts: strings or lists of token ids, or one of them.
            continuations: a list of token ids for each prompt, or one for one prompt.

        Returns: for each prompt, an entry for each token of its continuation.

        Raises:
            RequestError: an argument is bad, or a prompt with its continuation leaves no room for one more token.
            EngineError: a request failed, besides the reasons of every method.
        """
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        wholes = as_continued(prompts, continuations, self.tokenizer, self.model_config.vocab_size)
        result = self.generate([prompt + continuation for prompt, continuation in wholes], params)
        for index, error in enumerate(result["errors"]):
            if error is not None:
                raise EngineError(f"prompt {index}: {error}")
        entries = zip(result["prompt_logprobs"], wholes, strict=True)
        return [logprobs[len(prompt) :] for logprobs, (prompt, _) in entries]

    def stream(
        self,
        prompts: Prompt | ListOf[Prompt],
        sampling_params: SamplingParams | ListOf[SamplingParams] | None = None,
    ) -> Iterator[StreamOutput]:
        """As `generate`, yielding pieces as they come; dropping the iterator aborts what is left.

        Nothing is queued before the first piece is asked for.

        Raises:
            RequestError: as `generate`, at the call and not at the first piece.
        """
        with self._loop.guard.turn():
            return self._stream(self._check_all(prompts, sampling_params))

    def chat(
        self, messages: ListOf[Mapping[str, Any]], sampling_params: SamplingParams | None = None
    ) -> dict[str, list[Any]]:
        """What `generate` returns for a conversation, a list of `{"role": ..., "content": ...}`, as one prompt."""
        return self.generate([self.apply_chat_template(messages)], sampling_params)

    def apply_chat_template(self, messages: ListOf[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ending where the answer begins.

        Raises:
            RequestError: the checkpoint has no tokenizer or no chat template, or the template refuses the messages.
        """
        return tokenize_chat(messages, self.tokenizer)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and the state of the queues and the pool."""
        manager = self.scheduler.block_manager
        return {
            "requests": self._num_requests,
            "steps": self._loop.num_steps,
            "processed_tokens": self._loop.num_processed_tokens,
            "preemptions": self.scheduler.num_preemptions,
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.prefilling) + len(self.scheduler.running),
            "free_blocks": manager.num_free_blocks,
            "total_blocks": manager.num_blocks,
        }

    # ---- life ----

    def exit(self) -> None:
        """Give back the model, the cache and the graphs. Calling it again does nothing."""
        with self._loop.guard.turn():
            self._loop.closed = True
            self._finalizer()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.exit()

    # ---- below the surface ----

    def queue_prompt(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """Queue one prompt for a caller that steps `step_loop` itself and follows the completions, `params.n` of them.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        return self._queue(self._check(prompt, params))

    @property
    def step_loop(self) -> StepLoop:
        """What steps the engine; for whoever owns it from another thread."""
        return self._loop

    def _check(self, prompt: Prompt, params: SamplingParams) -> Request:
        if params.stop and self.tokenizer is None:
            raise RequestError(f"stop={params.stop!r} needs a tokenizer; use stop_token_ids, or set the tokenizer key")
        token_ids = tokenize(prompt, self.tokenizer, self.model_config.vocab_size)
        self.scheduler.check(len(token_ids), params.max_model_length)
        bad_words = tokenize_bad_words(params.bad_words, self.tokenizer)
        check_controls(params, self.model_config.vocab_size, self.model_config.eos_token_ids, bad_words)
        self._grammars.check(params)
        return Request(token_ids, params, bad_words)

    def _check_all(
        self, prompts: Prompt | ListOf[Prompt], sampling_params: SamplingParams | ListOf[SamplingParams] | None
    ) -> list[Request]:
        self._loop.require_usable()
        return as_requests(prompts, sampling_params, self._check)

    def _queue(self, request: Request, index: int = 0) -> list[Completion]:
        # Requests without a seed draw from the engine's, each from a stream of its own.
        seed = (self.config.seed + self._num_requests * 0x9E3779B97F4A7C15) % 2**64
        how = self.config.block_size, seed, request.bad_words, self._grammars.matcher
        first, *others = samples_of(request.token_ids, request.params, *how)
        self.scheduler.add_sequence(first, others)
        self._num_requests += 1
        completions = [
            Completion(seq, self.tokenizer, index, sample, first.seq_id) for sample, seq in enumerate([first, *others])
        ]
        self._loop.watched += [completion for completion in completions if completion.has_stop_strings]
        return completions

    def _queue_all(self, requests: list[Request]) -> list[Completion]:
        return [completion for index, request in enumerate(requests) for completion in self._queue(request, index)]

    def _stream(self, requests: list[Request]) -> Iterator[StreamOutput]:
        with self._loop.queued(lambda: self._queue_all(requests)) as completions:
            live = completions
            steps = self._loop.steps_until_finished(completions)
            while live:
                next(steps, None)  # None if the steps of other calls have finished these
                for completion in live:
                    piece = completion.next_piece()
                    if piece is not None:
                        yield piece
                live = [completion for completion in live if not completion.all_sent]


def _engine_config(config: Mapping[str, Any] | EngineConfig | str, keys: dict[str, Any]) -> EngineConfig:
    if isinstance(config, EngineConfig):
        return config.replace(**keys) if keys else config
    if isinstance(config, Mapping):
        return EngineConfig.from_dict({**config, **keys})
    return EngineConfig(model_name_or_path=config, **keys)
