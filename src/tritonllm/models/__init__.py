"""The built-in model families, registered through the same hook as any plugin.

Adding a checkpoint name here also needs its entry point in `pyproject.toml`: a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable

from tritonllm.hookspecs import ModelSpec, hookimpl


def _names(pattern: str, sizes: str, variants: str = "") -> tuple[str, ...]:
    """Every size of a release, plain and with each variant's suffix: `{}` in `pattern` stands for the size."""
    return tuple(pattern.format(size) + suffix for size in sizes.split() for suffix in ("", *variants.split()))


BUILTIN_SPECS: tuple[ModelSpec, ...] = (
    ModelSpec(
        name="llama",
        model="tritonllm.models.llama:LlamaForCausalLM",
        config="tritonllm.config:llama_config",
        architectures=("LlamaForCausalLM",),
        checkpoints=(
            *_names("Llama-2-{}-hf", "7b 13b 70b"),
            *_names("Llama-2-{}-chat-hf", "7b 13b 70b"),
            *_names("Meta-Llama-3-{}", "8B 70B", "-Instruct"),
            *_names("Meta-Llama-3.1-{}", "8B 70B 405B", "-Instruct"),
            *_names("Llama-3.1-{}", "8B 70B 405B", "-Instruct"),
            *_names("Llama-3.2-{}", "1B 3B", "-Instruct"),
            "Llama-3.3-70B-Instruct",
            *_names("SmolLM2-{}", "135M 360M 1.7B", "-Instruct"),
        ),
    ),
    ModelSpec(
        name="qwen3",
        model="tritonllm.models.qwen3:Qwen3ForCausalLM",
        config="tritonllm.config:qwen3_config",
        architectures=("Qwen3ForCausalLM",),
        checkpoints=(
            *_names("Qwen3-{}", "0.6B 1.7B 4B 8B 14B", "-Base"),
            "Qwen3-32B",
            "Qwen3-4B-Instruct-2507",
            "Qwen3-4B-Thinking-2507",
        ),
    ),
    ModelSpec(
        name="qwen2",
        model="tritonllm.models.qwen2:Qwen2ForCausalLM",
        config="tritonllm.config:qwen2_config",
        architectures=("Qwen2ForCausalLM",),
        checkpoints=(
            *_names("Qwen2-{}", "0.5B 1.5B 7B 72B", "-Instruct"),
            *_names("Qwen2.5-{}", "0.5B 1.5B 3B 7B 14B 32B 72B", "-Instruct"),
            *_names("Qwen2.5-Coder-{}", "0.5B 1.5B 3B 7B 14B 32B", "-Instruct"),
        ),
    ),
    ModelSpec(
        name="mistral",
        model="tritonllm.models.mistral:MistralForCausalLM",
        config="tritonllm.config:mistral_config",
        architectures=("MistralForCausalLM",),
        checkpoints=(
            "Mistral-7B-v0.1",
            "Mistral-7B-v0.3",
            "Mistral-7B-Instruct-v0.1",
            "Mistral-7B-Instruct-v0.2",
            "Mistral-7B-Instruct-v0.3",
        ),
    ),
    ModelSpec(
        name="gemma2",
        model="tritonllm.models.gemma2:Gemma2ForCausalLM",
        config="tritonllm.config:gemma2_config",
        architectures=("Gemma2ForCausalLM",),
        checkpoints=_names("gemma-2-{}", "2b 9b 27b", "-it"),
    ),
    ModelSpec(
        name="gemma3",
        model="tritonllm.models.gemma3:Gemma3ForCausalLM",
        config="tritonllm.config:gemma3_config",
        architectures=("Gemma3ForCausalLM",),
        checkpoints=("gemma-3-270m", "gemma-3-270m-it", "gemma-3-1b-pt", "gemma-3-1b-it"),
    ),
    ModelSpec(
        name="phi3",
        model="tritonllm.models.phi3:Phi3ForCausalLM",
        config="tritonllm.config:phi3_config",
        architectures=("Phi3ForCausalLM",),
        checkpoints=(
            *_names("Phi-3-mini-{}-instruct", "4k 128k"),
            *_names("Phi-3-medium-{}-instruct", "4k 128k"),
            "Phi-3.5-mini-instruct",
            "phi-4",
            "Phi-4-mini-instruct",
            "Phi-4-mini-reasoning",
            "Phi-4-reasoning",
            "Phi-4-reasoning-plus",
        ),
    ),
    ModelSpec(
        name="olmo2",
        model="tritonllm.models.olmo2:Olmo2ForCausalLM",
        config="tritonllm.config:olmo2_config",
        architectures=("Olmo2ForCausalLM",),
        checkpoints=(
            *_names("OLMo-2-0425-{}", "1B", "-Instruct"),
            *_names("OLMo-2-1124-{}", "7B 13B", "-Instruct"),
            *_names("OLMo-2-0325-{}", "32B", "-Instruct"),
        ),
    ),
)


def builtin_entry_points() -> dict[str, str]:
    """The `[project.entry-points.tritonllm]` table of this project: every built-in name, pointing at this module."""
    names = [name for spec in BUILTIN_SPECS for name in (*spec.architectures, *spec.checkpoints)]
    return dict.fromkeys(names, __name__)


@hookimpl
def tritonllm_register_models(register: Callable[[ModelSpec], None]) -> None:
    for spec in BUILTIN_SPECS:
        register(spec)
