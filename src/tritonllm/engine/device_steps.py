"""What the device runs of a step: the decode rows, from last tokens to next tokens in one piece or two, and prompts.

Every line here runs for every token. Think twice before adding one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch

from tritonllm.engine.control_state import ControlState
from tritonllm.engine.inputs import SamplingRows, StepInputs, row_inputs
from tritonllm.engine.mixed_steps import MixedSteps
from tritonllm.engine.sequence import Choice
from tritonllm.engine.token_choice import TokenChoice
from tritonllm.errors import EngineError
from tritonllm.kernels.decode_attention import DecodeWorkspace
from tritonllm.kernels.decode_rows import HEADER, advance_rows, load_rows
from tritonllm.kernels.longest_first import FEW_ROWS, longest_first
from tritonllm.models.attention_metadata import DecodeMetadata
from tritonllm.models.layers import LayerCache
from tritonllm.models.protocol import CausalLM


class Part(Enum):
    """A decode step as a whole, or a half of it: the forward pass, or one of its ends."""

    PLAIN = "plain"
    FILTERED = "filtered"
    FORWARD = "forward"
    """Up to the last hidden states, which stay."""
    PLAIN_END = "plain end"
    FILTERED_END = "filtered end"
    CONTROLLED_END = "controlled end"
    """From these to tokens, with everything that rows say about single tokens."""


CAPTURED = (Part.FORWARD, Part.CONTROLLED_END, Part.FILTERED, Part.PLAIN)
"""The parts that steps run, in the order in which they are captured: an end needs what the forward pass leaves."""

HALVES = (Part.FORWARD, Part.CONTROLLED_END, Part.FILTERED_END, Part.PLAIN_END)
"""Parts that launch every kernel of those, with a single forward pass: what a start runs before it captures."""

_ENDS = {
    Part.PLAIN: Choice.PLAIN,
    Part.PLAIN_END: Choice.PLAIN,
    Part.FILTERED: Choice.FILTERED,
    Part.FILTERED_END: Choice.FILTERED,
    Part.CONTROLLED_END: Choice.CONTROLLED,
}


def parts_of(choice: Choice) -> tuple[Part, ...]:
    """The parts of a step whose tokens are chosen like that, in order."""
    if choice.end is Choice.CONTROLLED:
        return Part.FORWARD, Part.CONTROLLED_END
    return (Part.PLAIN if choice is Choice.PLAIN else Part.FILTERED,)


class DeviceSteps:
    """Runs the forward passes of a step with the choice of their tokens.

    Args:
        model, choose: forward pass and choice.
        rows: int32 `[max_num_rows, HEADER + table width]`, the decode rows.
        sampled: int32 `[2 * max_num_rows]`, takes the tokens: of the decode rows, then of the chunks that sample.
        controls: what the rows say about single tokens.
        workspace: of decode attention.
        layers: gives the cache of each layer.
        block_size: tokens of a cache block.
        vocab_size: of the model.

    Attributes:
        hidden: `[max_num_rows, hidden_size]`, what FORWARD leaves for an end; None before the first.
        mixed: says which steps run both segments in one pass.
    """

    def __init__(
        self,
        model: CausalLM,
        choose: TokenChoice,
        rows: torch.Tensor,
        sampled: torch.Tensor,
        controls: ControlState,
        workspace: DecodeWorkspace,
        layers: Callable[[], list[LayerCache]],
        block_size: int,
        vocab_size: int,
    ) -> None:
        self._model = model
        self._choose = choose
        self._rows = rows
        self._sampled = sampled
        self._controls = controls
        self._workspace = workspace
        self._layers = layers
        self._sizes = block_size, vocab_size
        self.hidden: torch.Tensor | None = None
        self.mixed = MixedSteps(model)

    def decode(self, num_rows: int, part: Part) -> None:
        """A part of one decode step of the first rows, which touches static buffers alone; a graph captures this."""
        rows = self._rows[:num_rows]
        input_ids, positions, slots, context_lens = load_rows(self._rows, num_rows, *self._sizes)
        if part in (Part.PLAIN_END, Part.FILTERED_END, Part.CONTROLLED_END):
            if self.hidden is None:
                raise EngineError(f"the {part.value} of a step has no forward pass before it; run Part.FORWARD first")
            hidden = self.hidden[:num_rows]
        else:
            order = longest_first(context_lens) if num_rows > FEW_ROWS else None
            attn = DecodeMetadata(slots, rows[:, HEADER:], context_lens, self._workspace, order)
            hidden = self._model(input_ids, positions, self._layers(), attn)
        if part is Part.FORWARD:
            if self.hidden is None:  # now that its dtype is known
                self.hidden = hidden.new_zeros(len(self._rows), hidden.shape[1])
            self.hidden[:num_rows].copy_(hidden)
            return
        controls = self._controls.first(num_rows)
        tokens = self._choose(hidden, SamplingRows.of(rows), context_lens, _ENDS[part], controls, 0)
        advance_rows(self._rows, tokens, self._sampled[:num_rows])

    def prefill(self, inputs: StepInputs) -> None:
        """Run prompt chunks and sample for those that end a prompt."""
        attn = inputs.attn_of_last(self._workspace)
        hidden = self._model(inputs.input_ids, inputs.positions, self._layers(), attn)
        self._choose_of_chunks(hidden, inputs)

    def decode_and_prefill(self, num_rows: int, choice: Choice, inputs: StepInputs) -> None:
        """Both in one forward pass, for the first rows as they are, without padding.

        Args:
            choice: what choosing the tokens of the decode rows takes.
            inputs: of the chunks, with room for the rows.
        """
        attn = inputs.beside_rows(*row_inputs(self._rows, num_rows, *self._sizes, self._workspace))
        hidden = self._model(inputs.input_ids, inputs.positions, self._layers(), attn)
        sampling, controls = SamplingRows.of(self._rows[:num_rows]), self._controls.first(num_rows)
        tokens = self._choose(hidden[:num_rows], sampling, attn.decode.context_lens, choice.end, controls, 0)
        advance_rows(self._rows, tokens, self._sampled[:num_rows])
        self._choose_of_chunks(hidden, inputs, num_rows)

    def _choose_of_chunks(self, hidden: torch.Tensor, inputs: StepInputs, num_rows: int = 0) -> None:
        """Choose the first tokens of prompts that end, and report of prompts; `num_rows` rows lie before the chunks."""
        if inputs.followed:
            self._choose.report_prompts(hidden, inputs.followed)
        if inputs.sampling is None:
            return
        # A model may have returned those rows alone. If all tokens are wanted they are the same, as they come in order.
        alone = len(hidden) == num_rows + len(inputs.last_tokens)
        hidden = hidden[num_rows:] if alone else hidden.index_select(0, inputs.last_tokens)
        state = inputs.control_state(self._sizes[1])
        first = len(self._rows)
        tokens = self._choose(hidden, inputs.sampling, inputs.next_positions, inputs.choice.end, state, first)
        self._sampled[first : first + len(tokens)].copy_(tokens)
