"""What steps choose, on its way from the device to the host: tokens, and log probabilities where somebody asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tritonllm.engine.logprobs import StepLogprobs, TokenLogprobs
from tritonllm.engine.plan import StepPlan
from tritonllm.sampling_params import MAX_LOGPROBS


class _Sent(NamedTuple):
    plan: StepPlan
    tokens: torch.Tensor
    reports: torch.Tensor | None
    prompts: torch.Tensor | None
    done: Any  # an event of the device, None on a CPU


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
        self._prompts: torch.Tensor | None = None
        self._unread: deque[_Sent] = deque()

    def report(self, first_row: int, logprobs: torch.Tensor, ids: torch.Tensor, ranks: torch.Tensor) -> None:
        """Put what `token_logprobs` gave into the reports of rows from `first_row` on."""
        pack_report(self.reports[first_row : first_row + len(ranks)], logprobs, ids, ranks)

    def start_prompts(self, num_tokens: int) -> torch.Tensor:
        """Reports of so many tokens of prompts, as those in `reports`, for the caller to fill in this step."""
        self._prompts = torch.empty(num_tokens, self.reports.shape[1], dtype=torch.int32, device=self.tokens.device)
        return self._prompts

    def send(self, plan: StepPlan) -> None:
        """Queue the copy to the host, behind the step that was just launched."""
        sent = _Sent(
            plan,
            _to_host(self.tokens),
            _to_host(self.reports) if plan.reports else None,
            _to_host(self._prompts) if plan.reports_prompts and self._prompts is not None else None,
            torch.cuda.current_stream(self.tokens.device).record_event() if self.tokens.is_cuda else None,
        )
        self._prompts = None
        self._unread.append(sent)

    def __len__(self) -> int:
        """Steps sent and not received."""
        return len(self._unread)

    def clear(self) -> None:
        """Forget the steps that were not received."""
        self._unread.clear()

    def receive(self, wait: Callable[[Any], None] | None = None) -> tuple[list[int], StepLogprobs | None]:
        """Tokens of the oldest step sent, one for each decode row and then one for each chunk that samples.

        Args:
            wait: how to wait for an event of the device, None being that of a CPU; by default without watching others.

        Returns:
            The tokens, and the log probabilities if the step's plan reports any.
        """
        plan, tokens, reports, prompts, done = self._unread.popleft()
        if wait is not None:
            wait(done)
        elif done is not None:
            done.synchronize()
        num_sampled = sum(chunk.sample for chunk in plan.chunks)
        first, second = slice(plan.num_decode_rows), slice(self._max_num_rows, self._max_num_rows + num_sampled)
        chosen = tokens.tolist()
        logprobs = None
        if reports is not None or prompts is not None:
            sampled = None if reports is None else self._entries(torch.cat([reports[first], reports[second]]))
            logprobs = StepLogprobs(sampled, [] if prompts is None else self._entries(prompts))
        return chosen[first] + chosen[second], logprobs

    def _entries(self, reports: torch.Tensor) -> list[TokenLogprobs]:
        ranks, ids = reports[:, 0].tolist(), reports[:, 1 : 2 + self.num_top].tolist()
        logprobs = reports[:, 2 + self.num_top :].contiguous().view(torch.float32).tolist()
        return [
            TokenLogprobs(tokens[0], values[0], rank, list(zip(tokens[1:], values[1:], strict=True)))
            for rank, tokens, values in zip(ranks, ids, logprobs, strict=True)
        ]


def pack_report(rows: torch.Tensor, logprobs: torch.Tensor, ids: torch.Tensor, ranks: torch.Tensor) -> None:
    """Put what `token_logprobs` gave into rows of reports."""
    width = ids.shape[1]
    rows[:, 0].copy_(ranks)
    rows[:, 1 : 1 + width].copy_(ids)
    rows[:, 1 + width :].copy_(logprobs.view(torch.int32))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
