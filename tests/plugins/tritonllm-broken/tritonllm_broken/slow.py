"""Not broken, but it imports torch where a name would do, which makes every listing slow."""

import torch  # noqa: F401

from tritonllm import ModelSpec, hookimpl


@hookimpl
def tritonllm_register_models(register):
    register(ModelSpec(name="slow", model="tritonllm_broken.slow:Nothing", checkpoints=("Slow-1M",)))
