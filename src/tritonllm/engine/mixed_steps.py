"""Which form a step takes that decodes rows and computes prompt chunks: one forward pass over both, or one for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritonllm.engine.plan import StepPlan
from tritonllm.models.decoder import DecoderLM
from tritonllm.models.protocol import CausalLM

if TYPE_CHECKING:
    from tritonllm.engine.prefill_graphs import PrefillGraphs

WORK_BEHIND_LAUNCHES = 2**35
"""Products of a token and a weight of one layer that keep a GPU busy while the host launches the layer's kernels: about
10 of 10 us each, on 600 TFLOP/s. An estimate, not measured: 2,200 tokens of Qwen3-0.6B, or 180 of Qwen3-8B."""


def one_pass_pays(num_prompt_tokens: int, layer_weights: int, captured: bool) -> bool:
    """Whether decode rows and prompt tokens should go through the model together.

    One pass reads every weight once instead of twice, but the host launches its kernels one by one. Two passes may be
    replays of two captured graphs, which cost the host next to nothing. So prompt tokens that have a graph, and are too
    few to hide the host behind them, take a pass of their own.

    Args:
        layer_weights: numbers in the weights of a decoder layer, on one rank.
        captured: whether the prompt tokens fit a captured graph.
    """
    return not captured or num_prompt_tokens * layer_weights >= WORK_BEHIND_LAUNCHES


class MixedSteps:
    """Decides for the steps of one model. All ranks decide alike, as their layers are equally large.

    Args:
        model: of one rank. A class that is not the kit's own need not know of mixed steps, so it takes two passes.

    Attributes:
        possible: whether any step may take one pass.
    """

    def __init__(self, model: CausalLM) -> None:
        self.possible = isinstance(model, DecoderLM) and model.takes_mixed_steps
        layers = model.model.layers if isinstance(model, DecoderLM) and self.possible else ()
        self._layer_weights = max((sum(each.numel() for each in layer.parameters()) for layer in layers), default=0)

    def share_pass(self, plan: StepPlan, graphs: PrefillGraphs) -> bool:
        """Whether a step has both segments and runs them in one pass, with the graphs of short prefills at hand."""
        # What waits for masks keeps its hidden states where a decode step leaves them.
        if not (self.possible and plan.num_decode_rows and plan.chunks) or plan.waits_for_masks:
            return False
        num_prompt_tokens = plan.num_tokens - plan.num_decode_rows
        return one_pass_pays(num_prompt_tokens, self._layer_weights, graphs.layout_of(plan.chunks) is not None)
