"""What the host still has to read: the sequences of launched steps, and what is reported of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tritonllm.engine.logprobs import TokenLogprobs
from tritonllm.engine.plan import PrefillChunk
from tritonllm.engine.sequence import Sequence


@dataclass(frozen=True)
class InFlight:
    """The sequences of one launched step, in the order in which its tokens come back."""

    decoded: list[Sequence]
    prefilled: list[tuple[Sequence, PrefillChunk]]

    def record_logprobs(self, token_ids: list[int], entries: list[TokenLogprobs] | None) -> None:
        """Hand entries to the sequences that asked for them and whose token will be appended.

        Args:
            token_ids: of the step, as `Scheduler.postprocess` takes them.
            entries: as many, each with all the tokens that the device reports; None if nobody asked.
        """
        if entries is None:
            return
        sampled = [*self.decoded, *(seq for seq, chunk in self.prefilled if chunk.sample)]
        for seq, token, entry in zip(sampled, token_ids, entries, strict=True):
            controls = seq.sampling.controls
            if controls is not None and controls.num_logprobs >= 0 and token >= 0 and not seq.is_finished:
                seq.logprobs.append(entry._replace(top=entry.top[: controls.num_logprobs]))
