"""What tritonllm imports to learn of the family. It must stay cheap: everything else is named by a string."""

from tritonllm import ModelSpec, hookimpl


@hookimpl
def tritonllm_register_models(register):
    register(
        ModelSpec(
            name="toy",
            model="tritonllm_toy.model:ToyForCausalLM",
            checkpoints=("Toy-1M",),
            architectures=("ToyForCausalLM",),
            config="tritonllm_toy.config:toy_config",
            reference="tritonllm_toy.config:reference",
        )
    )
