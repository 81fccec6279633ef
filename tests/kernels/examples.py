"""How many examples of which size the tests of this lane run: a CPU interprets them, a GPU compiles for most."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from tritonllm.kernels.launch import interpreting
from tritonllm.testing.strategies import VOCAB_SIZES

ON_GPU = not interpreting()

# Most examples are a shape of their own: seconds of interpretation on a CPU, a compilation on a GPU.
EXAMPLES = settings(max_examples=8 if interpreting() else 20)

LARGE = 151936 if ON_GPU else 1503  # a vocabulary
sizes = st.sampled_from((1, *VOCAB_SIZES, 4096, 50257) if ON_GPU else (1, *VOCAB_SIZES[1:]))
seeds_of_tests = st.integers(0, 2**31 - 1)
# A row of `sample_tokens` is a dozen programs, each 10 to 20 ms in the interpreter.
few_examples = settings(max_examples=50 if ON_GPU else 4)
