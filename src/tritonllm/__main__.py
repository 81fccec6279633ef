"""`python -m tritonllm`: the same as the `tritonllm` command."""

from tritonllm.cli import main

if __name__ == "__main__":
    main()
