"""Implements a hook that does not exist."""

from tritonllm import hookimpl


@hookimpl
def tritonllm_register_model(register):
    register(None)
