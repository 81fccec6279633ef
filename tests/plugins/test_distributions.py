"""Plugins as their users install them: found through package metadata, by processes that know nothing of them."""

from __future__ import annotations

RESOLVE = """
import sys
from tritonllm.registry import default_registry
result = [default_registry().resolve(*query).name for query in {queries}] + ["torch" in sys.modules]
"""

LIST = """
import sys, warnings
warnings.simplefilter("ignore")
from tritonllm.registry import default_registry
result = {
    "plugins": {
        p.name: [p.owner, p.error, [s.name for s in p.specs], p.imports_torch]
        for p in default_registry().plugins()
    },
    "modules": sorted({"torch", "transformers", "tritonllm_toy.model", "tritonllm_toy.config"} & sys.modules.keys()),
}
"""


def resolve(*queries: tuple) -> str:
    return RESOLVE.format(queries=list(queries))


def test_a_plugin_serves_its_checkpoint_and_its_architecture(run_python, toy):
    queries = [("owner/Toy-1M",), ("/somewhere/else", ["ToyForCausalLM"]), ("Qwen3-0.6B",)]
    assert run_python(resolve(*queries), toy) == ["toy", "toy", "qwen3", False]


def test_listing_loads_plugins_but_no_model_class_and_no_torch(run_python, toy):
    listed = run_python(LIST, toy)
    assert listed == {"plugins": {"Toy-1M": ["tritonllm-toy 1.2.3", None, ["toy"], False]}, "modules": []}


def test_without_the_plugin_its_names_are_unknown(run_python):
    code = """
from tritonllm.errors import UnknownModelError
from tritonllm.registry import default_registry
try:
    default_registry().resolve("owner/Toy-1M", ["ToyForCausalLM"])
except UnknownModelError as error:
    result = str(error)
"""
    assert "No model serves checkpoint 'Toy-1M' (architectures: ToyForCausalLM)" in run_python(code)


def test_broken_plugins_disturb_neither_the_toy_nor_the_builtins(run_python, toy, broken):
    for folders in ((toy, broken), (broken, toy)):
        queries = [("Toy-1M",), ("/x", ["ToyForCausalLM"]), ("Qwen3-0.6B",)]
        assert run_python(resolve(*queries), *folders)[:3] == ["toy", "toy", "qwen3"]


def test_every_broken_plugin_is_listed_with_its_own_reason(run_python, toy, broken):
    plugins = run_python(LIST, toy, broken)["plugins"]
    assert plugins.pop("Toy-1M") == ["tritonllm-toy 1.2.3", None, ["toy"], False]
    assert plugins.pop("slow") == ["tritonllm-broken 0.0.1", None, ["slow"], True]
    reasons = {
        "a-missing-import": "no_such_package_anywhere",
        "a-missing-module": "tritonllm_broken.no_such_module",
        "exits": "SystemExit: 3",
        "misspelled": "tritonllm_register_model",
        "z-wrong-spec": "'wrong': model must be a string like",
    }
    assert plugins.keys() == reasons.keys()
    for name, part in reasons.items():
        distribution, error, specs, _ = plugins[name]
        assert distribution == "tritonllm-broken 0.0.1"
        assert part in error
        assert specs == []


def test_broken_plugins_are_not_even_imported_for_a_name_of_another(run_python, toy, broken):
    code = resolve(("Toy-1M",)) + "\nresult += [m for m in sys.modules if m.startswith('tritonllm_broken')]"
    assert run_python(code, toy, broken) == ["toy", False]


def test_the_environment_turns_plugins_off(run_python, toy, broken):
    names = (
        "from tritonllm.registry import default_registry\nresult = [p.name for p in default_registry().entry_points]"
    )
    assert len(run_python(names, toy, broken)) == 7
    assert run_python(names, toy, broken, TRITONLLM_PLUGINS="tritonllm-toy") == ["Toy-1M"]
    assert run_python(names, toy, broken, TRITONLLM_PLUGINS="") == []


def test_names_and_config_of_the_builtins_need_no_torch(run_python):
    code = """
import sys
import tritonllm, tritonllm.models, tritonllm.hookspecs, tritonllm.config
from tritonllm.registry import default_registry
result = ["torch" in sys.modules, default_registry().resolve("Qwen3-0.6B").name]
"""
    assert run_python(code, TRITONLLM_PLUGINS="") == [False, "qwen3"]


def test_the_model_and_its_config_are_found_by_the_strings_of_the_spec(run_python, toy):
    code = """
from tritonllm.registry import default_registry, load_model_class, load_object
spec = default_registry().resolve("Toy-1M")
fields = load_object(spec.reference)().to_dict()
config = load_object(spec.config)(fields)
result = [load_model_class(spec).__name__, config.num_layers, config.tie_word_embeddings]
"""
    assert run_python(code, toy) == ["ToyForCausalLM", 2, True]
