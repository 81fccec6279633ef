"""The conformance kit: is a model family right? It says so, or names the layer that is wrong.

    pytest --pyargs tritonllm.conformance --tritonllm-model NAME_OR_PATH
    pytest --pyargs tritonllm.conformance --tritonllm-spec package.module:SPEC
    tritonllm plugins check NAME

The kit builds a tiny random twin of the family in transformers, from the spec's `reference`, and loads it through the
engine in float32. It compares the hidden states after every layer, logits and greedy tokens; then the tokens of every
way to compute them: batched, chunked, from the prefix cache, preempted, as graphs, on two ranks; and it finds weights
that the model does not read. The same in Python, without pytest: `check(spec)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tritonllm.hookspecs import ModelSpec


def check(spec: ModelSpec, *, device: str = "auto", checkpoint: str | None = None) -> None:
    """Run the whole kit on one family.

    Args:
        spec: the family; it need not be registered.
        device: where the engine runs, "auto", "cuda" or "cpu"; transformers runs on the CPU.
        checkpoint: a folder or `.gguf` file of the family; its tensors must be those that the model asks for. They are
            not loaded.

    Raises:
        AssertionError: the model is not right; in plain words.
        TritonLLMError: the family cannot be loaded.
        ValueError: no twin can be made of its reference.
    """
    import tempfile

    from tritonllm.conformance.candidate import make_candidate, one_thread
    from tritonllm.conformance.checks import CHECKS

    with one_thread(), tempfile.TemporaryDirectory() as folder:
        candidate = make_candidate(spec, folder, device, checkpoint)
        for run in CHECKS.values():
            run(candidate)
