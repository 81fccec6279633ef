"""`python -m tritonllm.testing.interpreted`: complete prompts on Triton's interpreter, for the equality suite.

Reads one JSON object, `{"name", "prompts", "params", "keys"}`, and writes the completions as the last line. It is a
process of its own because the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import json
import sys

from tritonllm.errors import EngineError
from tritonllm.hookspecs import ModelSpec
from tritonllm.sampling_params import SamplingParams


def main() -> None:
    """Answer the request on stdin.

    Raises:
        EngineError: the interpreter is not on.
    """
    from tritonllm.kernels.launch import interpreting
    from tritonllm.testing.equality import way_engine
    from tritonllm.testing.interpreter import patch_once_a_launch

    if not interpreting():
        raise EngineError("the interpreter is off; set TRITON_INTERPRET=1 before Python starts")
    patch_once_a_launch()
    asked = json.load(sys.stdin)
    params = [SamplingParams(**fields) for fields in asked["params"]]
    keys = asked["keys"]
    keys["spec"] = keys["spec"] and ModelSpec(**keys["spec"])
    # Small blocks: a program reads whole blocks.
    with way_engine(asked["name"], asked["prompts"], params, keys, block_size=4) as engine:
        completions = engine.generate(asked["prompts"], params)["token_ids"]
    sys.stdout.write(f"{json.dumps(completions)}\n")


if __name__ == "__main__":
    main()
