"""What the host still has to read: the sequences of launched steps, and what is reported of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from tritonllm.engine.logprobs import StepLogprobs
from tritonllm.engine.plan import PrefillChunk
from tritonllm.engine.sequence import Sequence


@dataclass(frozen=True)
class InFlight:
    """The sequences of one launched step, in the order in which its tokens come back."""

    decoded: list[Sequence]
    prefilled: list[tuple[Sequence, PrefillChunk]]

    @cached_property
    def with_grammar(self) -> list[Sequence]:
        """Those whose tokens follow a grammar."""
        return [seq for seq in (*self.decoded, *(seq for seq, _ in self.prefilled)) if seq.matcher is not None]

    def follow_grammars(self) -> Iterator[tuple[Sequence, str]]:
        """Have grammars take in the tokens that were read; those that cannot go on, with the reason."""
        for seq in self.with_grammar:
            if seq.matcher is not None and not seq.is_finished:
                error = seq.matcher.accept(seq.token_ids[seq.num_prompt_tokens + seq.matcher.num_tokens :])
                if error is not None:
                    yield seq, error

    def record_logprobs(self, token_ids: list[int], logprobs: StepLogprobs) -> None:
        """Hand entries to the sequences that asked for them: of tokens that will be appended, and of their prompts.

        Args:
            token_ids: of the step, as `Scheduler.postprocess` takes them.
            logprobs: what the step reports of them and of its chunks.
        """
        sampled = [*self.decoded, *(seq for seq, chunk in self.prefilled if chunk.sample)]
        for seq, token, entry in zip(sampled, token_ids, logprobs.sampled or (), strict=False):
            num_top = seq.sampling_params.logprobs
            if num_top is not None and token >= 0 and not seq.is_finished:
                seq.logprobs.append(entry.cut(num_top))
        entries = iter(logprobs.prompts)
        for seq, chunk in self.prefilled:
            del seq.prompt_logprobs[chunk.start if chunk.next_token_ids else len(seq.prompt_logprobs) :]
            num_top = seq.sampling_params.prompt_logprobs or 0
            seq.prompt_logprobs += [entry.cut(num_top) for entry in islice(entries, len(chunk.next_token_ids))]
