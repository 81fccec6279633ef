"""What steps choose, on its way from the device to the host: tokens, and log probabilities where somebody asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tritonllm.engine.logprobs import TokenLogprobs
from tritonllm.engine.plan import StepPlan
from tritonllm.sampling_params import MAX_LOGPROBS


class StepResults:
    """Static buffers that steps write, and a copy of them for each launched step that was not read yet.

    Args:
        max_num_rows: R, most decode rows, and most chunks that sample in one step.
        vocab_size: of the model.
        device: where steps run.

    Attributes:
        tokens: int32 `[2 * R]`: those of the decode rows, and from R on those of the chunks that sample.
        reports: int32 `[2 * R, 1 + 2 * (1 + num_top)]`, rows as in `tokens`: the rank of the token, its id and the
            likeliest ids, and the float32 bits of their log probabilities.
        num_top: likeliest tokens that are reported of each.
    """

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_num_rows = max_num_rows
        self.num_top = min(MAX_LOGPROBS, vocab_size)
        self.tokens = torch.zeros(2 * max_num_rows, dtype=torch.int32, device=device)
        self.reports = torch.zeros(2 * max_num_rows, 3 + 2 * self.num_top, dtype=torch.int32, device=device)
        self._unread: deque[tuple[torch.Tensor, torch.Tensor | None, Any, StepPlan]] = deque()

    def report(self, first_row: int, logprobs: torch.Tensor, ids: torch.Tensor, ranks: torch.Tensor) -> None:
        """Put what `token_logprobs` gave into the reports of rows from `first_row` on."""
        rows = self.reports[first_row : first_row + len(ranks)]
        rows[:, 0].copy_(ranks)
        rows[:, 1 : 2 + self.num_top].copy_(ids)
        rows[:, 2 + self.num_top :].copy_(logprobs.view(torch.int32))

    def send(self, plan: StepPlan) -> None:
        """Queue the copy to the host, behind the step that was just launched."""
        on_gpu = self.tokens.is_cuda
        sent = [
            torch.empty_like(tensor, device="cpu", pin_memory=on_gpu).copy_(tensor, non_blocking=True)
            for tensor in ((self.tokens, self.reports) if plan.reports else (self.tokens,))
        ]
        done = torch.cuda.current_stream(self.tokens.device).record_event() if on_gpu else None
        self._unread.append((sent[0], sent[1] if plan.reports else None, done, plan))

    def __len__(self) -> int:
        """Steps sent and not received."""
        return len(self._unread)

    def clear(self) -> None:
        """Forget the steps that were not received."""
        self._unread.clear()

    def receive(self, wait: Callable[[Any], None] | None = None) -> tuple[list[int], list[TokenLogprobs] | None]:
        """Tokens of the oldest step sent, one for each decode row and then one for each chunk that samples.

        Args:
            wait: how to wait for an event of the device, None being that of a CPU; by default without watching others.

        Returns:
            The tokens, and as many entries with the log probabilities if the step's plan reports any.
        """
        tokens, reports, done, plan = self._unread.popleft()
        if wait is not None:
            wait(done)
        elif done is not None:
            done.synchronize()
        num_sampled = sum(chunk.sample for chunk in plan.chunks)
        first, second = slice(plan.num_decode_rows), slice(self._max_num_rows, self._max_num_rows + num_sampled)
        chosen = tokens.tolist()
        if reports is None:
            return chosen[first] + chosen[second], None
        return chosen[first] + chosen[second], self._entries(torch.cat([reports[first], reports[second]]))

    def _entries(self, reports: torch.Tensor) -> list[TokenLogprobs]:
        ranks, ids = reports[:, 0].tolist(), reports[:, 1 : 2 + self.num_top].tolist()
        logprobs = reports[:, 2 + self.num_top :].contiguous().view(torch.float32).tolist()
        return [
            TokenLogprobs(tokens[0], values[0], rank, list(zip(tokens[1:], values[1:], strict=True)))
            for rank, tokens, values in zip(ranks, ids, logprobs, strict=True)
        ]
