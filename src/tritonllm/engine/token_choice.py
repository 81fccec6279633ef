"""The ends of the forward pass: straight to tokens, or logits and then a choice among them."""

from __future__ import annotations

import torch

from tritonllm.engine.control_state import ControlState
from tritonllm.engine.inputs import SamplingRows
from tritonllm.engine.sequence import Choice
from tritonllm.engine.step_results import StepResults, pack_report
from tritonllm.engine.upload import to_device
from tritonllm.kernels.logit_controls import adjust_logits
from tritonllm.kernels.logprobs import token_logprobs
from tritonllm.kernels.row_layout import NUM_LOGPROBS
from tritonllm.kernels.sampling import pick_tokens, sample_tokens
from tritonllm.models.decoder import DecoderLM
from tritonllm.models.layers import LMHead
from tritonllm.models.protocol import CausalLM

_PROMPT_ROWS = 256
"""Tokens of a prompt whose logits are there at a time."""


class TokenChoice:
    """Chooses the next tokens of a model; the same token comes out of every end that applies.

    Every rank chooses, and all choose alike: from the same full logits, or from the same best tokens of each shard.
    """

    def __init__(self, model: CausalLM, results: StepResults) -> None:
        self._results = results
        self._compute_logits = model.compute_logits
        # With a compute_logits of its own a model decides what a logit is, so its head is not bypassed.
        self._head: LMHead | None = None
        if isinstance(model, DecoderLM) and type(model).compute_logits is DecoderLM.compute_logits:
            self._head = model.lm_head

    def __call__(
        self,
        hidden: torch.Tensor,
        sampling: SamplingRows,
        positions: torch.Tensor,
        end: Choice,
        state: ControlState | None = None,
        first_row: int = 0,
    ) -> torch.Tensor:
        """Tokens int32 `[N]` of hidden states `[N, hidden_size]`.

        Args:
            positions: int32 `[N]`, those of the new tokens; they key the noise.
            end: what the most demanding row takes, PLAIN, FILTERED or CONTROLLED.
            state: what the rows say about single tokens, for the end CONTROLLED; the newest token of each is counted.
            first_row: row of the results for what that end reports.
        """
        if end is Choice.PLAIN and self._head is not None:
            return self._head.pick_tokens(hidden, sampling.temperatures, sampling.seeds, positions)
        logits = self._compute_logits(hidden)
        if end is Choice.PLAIN:
            return pick_tokens(logits, sampling.temperatures, sampling.seeds, positions)
        filters = sampling.temperatures, sampling.top_ks, sampling.top_ps
        if end is Choice.FILTERED or state is None:
            return sample_tokens(logits, *filters, sampling.seeds, positions)
        adjusted = adjust_logits(logits, sampling.headers, **vars(state))
        tokens = sample_tokens(adjusted, *filters, sampling.seeds, positions, sampling.min_ps)
        wanted = sampling.headers[:, NUM_LOGPROBS]
        self._results.report(first_row, *token_logprobs(logits, tokens, wanted, self._results.num_top))
        return tokens

    def report_prompts(self, hidden: torch.Tensor, followed: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        """Report log probabilities of prompts, of a few tokens at a time: all their logits would not fit.

        Args:
            hidden: `[T, hidden_size]` of a step.
            followed: as in `StepInputs`.
        """
        tokens = to_device([token for _, following in followed for token in following], hidden.device)
        wanted = torch.ones(_PROMPT_ROWS, dtype=torch.int32, device=hidden.device)
        report = self._results.start_prompts(len(tokens))
        done = 0
        for start, following in followed:
            for first in range(0, len(following), _PROMPT_ROWS):
                count = min(_PROMPT_ROWS, len(following) - first)
                logits = self._compute_logits(hidden[start + first : start + first + count])
                rows = slice(done, done + count)
                # A copy, since a slice's alignment would depend on the lengths of prompts, and with it the kernel.
                given = tokens[rows].clone()
                pack_report(report[rows], *token_logprobs(logits, given, wanted[:count], self._results.num_top))
                done += count
