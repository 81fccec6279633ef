"""The ops of `tritonllm.kernels` against the limits of the GPU at hand: `tritonllm kernels bench`."""
