"""Registers something that is no valid spec, after one that is."""

from tritonllm import ModelSpec, hookimpl


@hookimpl
def tritonllm_register_models(register):
    register(ModelSpec(name="half", model="tritonllm_broken.exits:Nothing", checkpoints=("Half-1M",)))
    register(ModelSpec(name="wrong", model="tritonllm_broken.exits", checkpoints=("Wrong-1M",)))
