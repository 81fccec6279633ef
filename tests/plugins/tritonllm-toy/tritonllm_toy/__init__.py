"""Toy: a decoder with normalised queries and keys, added to tritonllm from outside."""
