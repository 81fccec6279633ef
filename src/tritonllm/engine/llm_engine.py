"""The engine that a user holds: prompts in, tokens and text out."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping, MutableMapping
from collections.abc import Sequence as ListOf
from contextlib import closing
from types import TracebackType
from typing import Any

from tritonllm.config import EngineConfig
from tritonllm.engine.detokenizer import Detokenizer, decode
from tritonllm.engine.model_runner import ModelRunner
from tritonllm.engine.outputs import RequestOutput, StreamOutput
from tritonllm.engine.prompts import Prompt, as_params_list, as_prompt_list, tokenize
from tritonllm.engine.resolve import resolve_model
from tritonllm.engine.scheduler import Scheduler
from tritonllm.engine.sequence import Sequence
from tritonllm.errors import EngineError, RequestError
from tritonllm.sampling_params import SamplingParams


class LLMEngine:
    """Serves one checkpoint.

    Args:
        config: a dict of configuration keys, an `EngineConfig`, or a model name or path.
        keys: configuration keys, beside a name or path.

    If a dict is given, the number of cache blocks in effect is written into its `max_cached_blocks`.

    Attributes:
        config: the configuration in effect, frozen.
        tokenizer: the checkpoint's, None for dummy weights.
        scheduler, runner: the two halves below.

    Raises:
        ConfigError: a key or value is wrong or contradicts the checkpoint.
        CheckpointError: the checkpoint is missing or incomplete.
        UnknownModelError: no model family serves it.
    """

    def __init__(self, config: Mapping[str, Any] | EngineConfig | str, **keys: Any) -> None:
        self._closed = True
        engine_config = _engine_config(config, keys)
        resolved = resolve_model(engine_config)
        self.tokenizer = resolved.tokenizer
        self.model_config = resolved.config
        self.runner = ModelRunner(engine_config, resolved=resolved)
        # At interpreter exit, or when the engine is collected, whichever comes first.
        self._finalizer = weakref.finalize(self, self.runner.call, "exit")
        self.config = resolved.engine.replace(max_cached_blocks=self.runner.num_blocks)
        if isinstance(config, MutableMapping):
            config["max_cached_blocks"] = self.runner.num_blocks
        self.scheduler = Scheduler(
            self.config.max_num_sequences,
            self.config.max_num_batched_tokens,
            self.runner.num_blocks,
            self.config.block_size,
            resolved.config.eos_token_ids,
            self.config.max_model_length,
        )
        self._sequences: dict[int, Sequence] = {}  # of add_prompt, until step() reports them
        self._num_requests = 0
        self._num_processed_tokens = 0
        self._num_steps = 0
        self._closed = False

    # ---- requests ----

    def add_prompt(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt, a string or token ids, and return its seq_id.

        Raises:
            RequestError: it can never be served; nothing was queued.
            EngineError: the engine was closed.
        """
        self._require_open()
        (params,) = as_params_list(sampling_params, 1)
        seq = self._queue(self._check(prompt, params), params)
        self._sequences[seq.seq_id] = seq
        return seq.seq_id

    def abort(self, seq_id: int) -> bool:
        """End a request; the next `step()` reports it with finish reason "abort".

        Returns:
            False if there is no unfinished request of that id.
        """
        seq = self._sequences.get(seq_id)
        return seq is not None and self.scheduler.abort(seq)

    def step(self) -> tuple[list[RequestOutput], int, bool]:
        """Launch the next step, if there is work, and read the step before it.

        Returns:
            The requests found finished, each once; the tokens of the step launched; whether it held prompt tokens.
        """
        finished, num_tokens, is_prefill = self._advance()
        for seq in finished:
            del self._sequences[seq.seq_id]
        return [RequestOutput.of(seq) for seq in finished], num_tokens, is_prefill

    def generate(
        self,
        prompts: Prompt | ListOf[Prompt],
        sampling_params: SamplingParams | ListOf[SamplingParams] | None = None,
    ) -> dict[str, list[Any]]:
        """Complete prompts and wait for all of them; requests already in the engine go on beside them.

        Args:
            prompts: strings or lists of token ids, or one of them.
            sampling_params: one for all prompts, or one for each.

        Returns:
            Lists in the order of the prompts: `text`, `token_ids`, `finish_reason` ("stop", "length", "abort" or
            "error"), `usage` (token counts) and `errors` (None, or why that request failed).

        Raises:
            RequestError: an argument is bad; names the index of the prompt, and no prompt of the call was queued.
        """
        self._require_open()
        requests = self._check_all(prompts, sampling_params)
        sequences = [self._queue(token_ids, params) for token_ids, params in requests]
        for _ in self._steps_until_finished(sequences):
            pass
        outputs = [RequestOutput.of(seq) for seq in sequences]
        return {
            "text": [
                decode(self.tokenizer, seq.completion_token_ids, seq.sampling_params.skip_special_tokens)
                for seq in sequences
            ],
            "token_ids": [output.token_ids for output in outputs],
            "finish_reason": [output.finish_reason for output in outputs],
            "usage": [output.usage for output in outputs],
            "errors": [output.error for output in outputs],
        }

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
        self._require_open()
        return self._stream(self._check_all(prompts, sampling_params))

    def chat(
        self, messages: ListOf[Mapping[str, Any]], sampling_params: SamplingParams | None = None
    ) -> dict[str, list[Any]]:
        """Answer a conversation, a list of `{"role": ..., "content": ...}`, through the checkpoint's chat template.

        Returns what `generate` returns for one prompt.
        """
        return self.generate([self.apply_chat_template(messages)], sampling_params)

    def apply_chat_template(self, messages: ListOf[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ending where the answer begins.

        Raises:
            RequestError: the checkpoint has no tokenizer or no chat template, or the template refuses the messages.
        """
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise RequestError("this checkpoint has no chat template; use generate() with a plain prompt")
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs of the checkpoint and raise what they like
            raise RequestError(f"the chat template does not take these messages: {error}") from error
        return self.tokenizer.encode(text, add_special_tokens=False)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and the state of the queues and the pool."""
        manager = self.scheduler.block_manager
        return {
            "requests": self._num_requests,
            "steps": self._num_steps,
            "processed_tokens": self._num_processed_tokens,
            "preemptions": self.scheduler.num_preemptions,
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.prefilling) + len(self.scheduler.running),
            "free_blocks": manager.num_free_blocks,
            "total_blocks": manager.num_blocks,
        }

    # ---- life ----

    def exit(self) -> None:
        """Give back the model, the cache and the graphs. Calling it again does nothing."""
        self._closed = True
        finalizer = getattr(self, "_finalizer", None)
        if finalizer is not None:
            finalizer()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.exit()

    # ---- below the surface ----

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed by exit(); make a new one")

    def _check(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Token ids of a prompt that can be served."""
        token_ids = tokenize(prompt, self.tokenizer, self.model_config.vocab_size)
        self.scheduler.check(len(token_ids), params.max_model_length)
        return token_ids

    def _check_all(
        self, prompts: Prompt | ListOf[Prompt], sampling_params: SamplingParams | ListOf[SamplingParams] | None
    ) -> list[tuple[list[int], SamplingParams]]:
        listed = as_prompt_list(prompts)
        listed_params = as_params_list(sampling_params, len(listed))
        checked = []
        for index, (prompt, params) in enumerate(zip(listed, listed_params, strict=True)):
            try:
                checked.append((self._check(prompt, params), params))
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from error
        return checked

    def _queue(self, token_ids: list[int], params: SamplingParams) -> Sequence:
        # Requests without a seed draw from the engine's, each from a stream of its own.
        seed = (self.config.seed + self._num_requests * 0x9E3779B97F4A7C15) % 2**64
        seq = Sequence(token_ids, params, block_size=self.config.block_size, seed=seed)
        self.scheduler.add_sequence(seq)
        self._num_requests += 1
        return seq

    def _advance(self) -> tuple[list[Sequence], int, bool]:
        """One step of the engine: the requests of `add_prompt` found finished, then as `step`."""
        self._require_open()
        plan = self.scheduler.schedule()
        if plan is not None:
            self.runner.call("launch", plan)
            self._num_steps += 1
            self._num_processed_tokens += plan.num_tokens
        finished = self.scheduler.take_finished()
        # The host stays one step behind: with a step launched just now, read the one before it.
        if self.scheduler.num_steps_in_flight > (1 if plan is not None else 0):
            finished += self.scheduler.postprocess(self.runner.collect())
        # A generate or stream call looks at its own sequences itself.
        finished = [seq for seq in finished if seq.seq_id in self._sequences]
        return finished, plan.num_tokens if plan is not None else 0, plan is not None and bool(plan.chunks)

    def _steps_until_finished(self, sequences: list[Sequence]) -> Generator[None]:
        """Step until these are done, keeping what else finishes for `step`; whatever ends it early aborts them."""
        try:
            while not all(seq.is_finished for seq in sequences):
                self.scheduler.keep_finished(self._advance()[0])
                yield
            # With nobody left, read the surplus steps too: an idle engine holds no blocks.
            while self.scheduler.num_steps_in_flight and not self.scheduler.has_requests:
                self.scheduler.keep_finished(self._advance()[0])
        finally:
            for seq in sequences:
                self.scheduler.abort(seq)

    def _stream(self, requests: list[tuple[list[int], SamplingParams]]) -> Iterator[StreamOutput]:
        sequences = [self._queue(token_ids, params) for token_ids, params in requests]
        detokenizers = [Detokenizer(self.tokenizer, params.skip_special_tokens) for _, params in requests]
        sent = [0] * len(sequences)
        live = list(range(len(sequences)))
        with closing(self._steps_until_finished(sequences)) as steps:
            for _ in steps:
                for index in list(live):
                    seq = sequences[index]
                    token_ids = seq.completion_token_ids[sent[index] :]
                    if not token_ids and not seq.is_finished:
                        continue
                    sent[index] += len(token_ids)
                    text = detokenizers[index].add(token_ids, last=seq.is_finished)
                    if seq.is_finished:
                        live.remove(index)
                    yield StreamOutput(index, text, token_ids, seq.finish_reason, seq.error)


def _engine_config(config: Mapping[str, Any] | EngineConfig | str, keys: dict[str, Any]) -> EngineConfig:
    if isinstance(config, EngineConfig):
        return config.replace(**keys) if keys else config
    if isinstance(config, Mapping):
        return EngineConfig.from_dict({**config, **keys})
    return EngineConfig(model_name_or_path=config, **keys)
