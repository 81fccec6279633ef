"""A script with model classes of its own, registered in the process, on two ranks; prints what came of each."""

from __future__ import annotations

import json
import sys

from tritonllm import LLMEngine, ModelSpec, SamplingParams, register
from tritonllm.models.llama import LlamaForCausalLM

SIZES = {
    "load_format": "dummy",
    "device": "cpu",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "block_size": 8,
    "max_model_length": 64,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Above(LlamaForCausalLM):
    """Every rank imports it with the script."""


if __name__ == "__main__":

    class Below(LlamaForCausalLM):
        """No rank ever sees it: this part of the script does not run there."""

    def complete(name: str, world_size: int) -> list[int]:
        with LLMEngine(name, world_size=world_size, **SIZES) as engine:
            return engine.generate([[3, 4, 5]], GREEDY)["token_ids"][0]

    for name in ("Above", "Below"):
        register(ModelSpec(name=name, model=f"__main__:{name}", checkpoints=(f"{name}-1M",)))
    one, two = complete("Above-1M", 1), complete("Above-1M", 2)
    assert complete("Below-1M", 1) == one
    try:
        complete("Below-1M", 2)
    except Exception as error:
        refusal = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps({"one": one, "two": two, "refusal": refusal}))
