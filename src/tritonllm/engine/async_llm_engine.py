"""The engine for asyncio: many coroutines, each with its own request, in one batch."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as ListOf
from types import TracebackType
from typing import Any

from tritonllm.config import EngineConfig
from tritonllm.config.checks import integer
from tritonllm.engine.completion import Completion
from tritonllm.engine.engine_thread import EngineThread, Submission
from tritonllm.engine.llm_engine import LLMEngine
from tritonllm.engine.mailbox import Mailbox
from tritonllm.engine.outputs import StreamOutput
from tritonllm.engine.prompts import Prompt, as_params_list
from tritonllm.errors import ConfigError
from tritonllm.sampling_params import SamplingParams


class AsyncLLMEngine:
    """Serves one checkpoint to any number of coroutines, in any number of event loops.

    One background thread owns an `LLMEngine` and steps it while there are requests; prompts become token ids there as
    well, so a tokenizer is never used by two threads.

    - Fairness: requests are admitted in the order of their arrival, and every step decodes each running one.
    - Back-pressure: at most `max_requests` are in the engine, further ones wait in `generate`. A consumer that is slow
      holds up nobody: what it has not taken becomes one larger piece, so no more than its completion is kept.
    - Cancellation: leaving the loop over `generate`, cancelling its task or closing its event loop aborts the request
      before the next step; its blocks are free once the step under way was read.
    - Failures: after an exception inside a step every consumer gets EngineError, and so does every later call. A prompt
      that cannot be served raises RequestError for its own consumer alone.

    Loading takes a while; in a running event loop, `await asyncio.to_thread(AsyncLLMEngine, ...)`.

    Args:
        config, keys: as for `LLMEngine`.
        max_requests: requests in the engine at a time, running and waiting, >= 1.

    Attributes:
        engine: the engine inside. It refuses every call but `stats`, since another thread has its turn.

    Raises:
        ConfigError: `max_requests` is no such number; and as `LLMEngine`.
    """

    def __init__(
        self, config: Mapping[str, Any] | EngineConfig | str, *, max_requests: int = 1024, **keys: Any
    ) -> None:
        integer(1).check("max_requests", max_requests, ConfigError)
        self.engine = LLMEngine(config, **keys)
        self._thread = EngineThread(self.engine, max_requests)
        # At interpreter exit, or when this object is collected, whichever comes first.
        self._finalizer = weakref.finalize(self, self._thread.close)

    def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncIterator[StreamOutput]:
        """Complete one prompt, a string or token ids, piece by piece: `async for piece in engine.generate(...)`.

        The last piece of each sample has a finish reason; the texts joined are what `LLMEngine.generate` gives. Nothing
        is queued before the first piece is asked for.

        Raises:
            RequestError: the prompt cannot be served; raised where the first piece is asked for.
            EngineError: the engine was closed or has failed.
        """
        (params,) = as_params_list(sampling_params, 1)
        engine = self.engine
        return self._pieces(lambda: engine.queue_prompt(prompt, params), params.n)

    def chat(
        self, messages: ListOf[Mapping[str, Any]], sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[StreamOutput]:
        """Answer a conversation through the checkpoint's chat template, as `generate` does a prompt."""
        (params,) = as_params_list(sampling_params, 1)
        engine = self.engine
        return self._pieces(lambda: engine.queue_prompt(engine.apply_chat_template(messages), params), params.n)

    def stats(self) -> dict[str, int]:
        """As `LLMEngine.stats`."""
        return self.engine.stats()

    def exit(self) -> None:
        """End the thread after the step under way and give back the memory; consumers that wait get EngineError.

        Calling it again does nothing.
        """
        self._finalizer()

    async def __aenter__(self) -> AsyncLLMEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.exit)

    async def _pieces(self, queue: Callable[[], list[Completion]], num_samples: int) -> AsyncIterator[StreamOutput]:
        submission = Submission(queue, Mailbox())
        self._thread.submit(submission)
        num_unfinished = num_samples
        try:
            while num_unfinished:
                for piece in await submission.box.take():
                    num_unfinished -= piece.finish_reason is not None
                    yield piece
        finally:
            if num_unfinished:
                self._thread.drop(submission)
