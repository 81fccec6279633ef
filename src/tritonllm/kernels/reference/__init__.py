"""The ops in plain PyTorch: what a kernel is tested against, and what runs on a CPU without the interpreter.

Each function has the signature of its op. Arithmetic is in fp32 with the op's own roundings, so that a kernel and its
reference differ only by the order of a sum.
"""
