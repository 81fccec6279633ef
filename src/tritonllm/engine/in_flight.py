"""What the host still has to read: the sequences of launched steps, and what is reported of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from tritonllm.engine.logprobs import StepLogprobs
from tritonllm.engine.plan import PrefillChunk
from tritonllm.engine.sequence import Sequence


@dataclass(frozen=True)
class InFlight:
    """The sequences of one launched step, in the order in which its tokens come back."""

    decoded: list[Sequence]
    prefilled: list[tuple[Sequence, PrefillChunk]]

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
