"""Names of checkpoints, the plugin contract, and that resolution is the same in every order of discovery."""

from __future__ import annotations

import concurrent.futures
import itertools
import pickle
import sys
import time
import types
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tritonllm
from tritonllm.checkpoint_names import checkpoint_key, checkpoint_keys
from tritonllm.errors import DuplicateModelError, PluginError, UnknownModelError
from tritonllm.hookspecs import ModelSpec, hookimpl
from tritonllm.models import BUILTIN_SPECS, builtin_entry_points
from tritonllm.plugin_discovery import PLUGINS_VARIABLE
from tritonllm.registry import (
    IN_PROCESS,
    ModelRegistry,
    default_registry,
    load_model_class,
    load_object,
    process_registry,
)

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def spec(name: str = "toy", **fields) -> ModelSpec:
    return ModelSpec(**({"name": name, "model": f"{name}.model:Model", "checkpoints": ("Toy-1M",)} | fields))


def plugin_module(*specs: ModelSpec) -> types.ModuleType:
    module = types.ModuleType("plugin")

    @hookimpl
    def tritonllm_register_models(register):
        for one in specs:
            register(one)

    module.tritonllm_register_models = tritonllm_register_models
    return module


class FakeEntryPoint:
    """What importlib.metadata gives for one line of a plugin's pyproject.toml."""

    def __init__(self, name, plugin, distribution="tritonllm-toy", value=None):
        self.name = name
        self.value = value or f"{distribution}.{name}"
        self.dist = types.SimpleNamespace(name=distribution, version="1.0")
        self.plugin = plugin
        self.loads = 0

    def load(self):
        self.loads += 1
        if isinstance(self.plugin, BaseException):
            raise self.plugin
        return self.plugin


class TestCheckpointKey:
    @given(
        name=st.text("aZ3.-_", min_size=1, max_size=12).map(lambda text: f"M{text}1").filter(lambda n: "--" not in n),
        slashes=st.sampled_from(["", "/", "//"]),
    )
    def test_every_way_to_write_a_checkpoint_gives_one_key(self, name, slashes):
        owner, commit = "some-owner", "0f" * 20
        spellings = [
            name,
            f"{owner}/{name}",
            f"/models/{owner}/{name}",
            f"./{name}",
            f"C:\\models\\{name}",
            f"/cache/hub/models--{owner}--{name}",
            f"/cache/hub/models--{owner}--{name}/snapshots/{commit}",
            f"C:\\cache\\models--{owner}--{name}\\snapshots\\{commit}",
        ]
        assert {checkpoint_key(spelling + slashes) for spelling in spellings} == {name}

    @pytest.mark.parametrize(
        ("file", "keys"),
        [
            ("SmolLM2-135M-Instruct.Q4_1.gguf", ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M-Instruct")),
            ("/m/Qwen3-0.6B-Q8_0.gguf", ("Qwen3-0.6B-Q8_0", "Qwen3-0.6B")),
            ("Llama-3.2-1B-Instruct-UD-Q4_K_XL.GGUF", ("Llama-3.2-1B-Instruct-UD-Q4_K_XL", "Llama-3.2-1B-Instruct")),
            ("Qwen3-4B-IQ4_XS.gguf", ("Qwen3-4B-IQ4_XS", "Qwen3-4B")),
            ("model-bf16.gguf", ("model-bf16", "model")),
            ("Qwen3-0.6B.gguf", ("Qwen3-0.6B",)),
        ],
    )
    def test_a_gguf_file_is_known_with_and_without_its_quantization(self, file, keys):
        assert checkpoint_keys(file) == keys

    def test_a_link_is_known_by_its_own_name_and_dots_by_the_folder(self, tmp_path, monkeypatch):
        folder = tmp_path / "0f" / "Qwen3-0.6B"
        folder.mkdir(parents=True)
        (tmp_path / "Qwen3-4B").symlink_to(folder)
        assert checkpoint_key(tmp_path / "Qwen3-4B") == "Qwen3-4B"
        monkeypatch.chdir(folder)
        assert checkpoint_key(".") == "Qwen3-0.6B"
        assert checkpoint_key("./") == "Qwen3-0.6B"
        assert checkpoint_key("..") == "0f"


class TestModelSpec:
    @pytest.mark.parametrize(
        ("fields", "part"),
        [
            ({"name": ""}, "name"),
            ({"model": "package.module"}, "package.module:Name"),
            ({"model": None}, "model must be"),
            ({"config": "no colon"}, "config must be"),
            ({"reference": 3}, "reference must be"),
            ({"checkpoints": "Toy-1M"}, "needs its comma"),
            ({"checkpoints": ("org/Toy-1M",)}, "final path component"),
            ({"architectures": (1,)}, "architectures must be"),
            ({"checkpoints": ()}, "serves nothing"),
            ({"api": 2}, "api 2"),
        ],
    )
    def test_a_wrong_field_is_named(self, fields, part):
        with pytest.raises(PluginError, match=part):
            ModelSpec(**({"name": "toy", "model": "a.b:C", "checkpoints": ("Toy-1M",)} | fields))

    def test_it_travels_to_other_processes(self):
        toy = spec(overrides=["llama"])
        assert toy.overrides == ("llama",)
        assert pickle.loads(pickle.dumps(toy)) == toy


class TestBuiltins:
    def test_every_builtin_name_resolves_to_its_own_spec(self):
        registry = ModelRegistry([])
        for builtin in BUILTIN_SPECS:
            for name in builtin.checkpoints:
                assert registry.resolve(f"owner/{name}") is builtin
            for architecture in builtin.architectures:
                assert registry.resolve("/some/fine-tune", ["NoSuchModel", architecture]) is builtin

    def test_entry_points_of_the_project_are_the_table(self):
        tomllib = pytest.importorskip("tomllib")
        project = tomllib.loads(PYPROJECT.read_text())["project"]
        assert project["entry-points"]["tritonllm"] == builtin_entry_points()

    def test_a_checkpoint_match_beats_an_architecture_match(self):
        assert ModelRegistry([]).resolve("Qwen3-0.6B", ["LlamaForCausalLM"]).name == "qwen3"

    def test_unknown_names_are_explained(self):
        broken = FakeEntryPoint("broken", ImportError("no module named nothing"), "tritonllm-broken")
        registry = ModelRegistry([broken])
        with pytest.warns(UserWarning, match="'broken' of tritonllm-broken 1.0"):
            registry.plugins()
        with pytest.raises(UnknownModelError) as caught:
            registry.resolve("owner/qwen3-0.6b", ["FooForCausalLM"])
        message = str(caught.value)
        for part in (
            "'qwen3-0.6b'",
            "FooForCausalLM",
            "Close matches: Qwen3-0.6B",
            "LlamaForCausalLM",
            "no module named",
        ):
            assert part in message


class TestPlugins:
    def test_an_entry_point_named_like_the_checkpoint_is_the_only_one_loaded(self):
        toy, other = spec(checkpoints=(), architectures=("ToyForCausalLM",)), spec("other", checkpoints=("Other-1M",))
        points = [FakeEntryPoint("Toy-1M", plugin_module(toy)), FakeEntryPoint("other", plugin_module(other))]
        registry = ModelRegistry(points)
        assert registry.resolve("owner/Toy-1M") is toy
        assert [point.loads for point in points] == [1, 0]
        assert registry.resolve("/x/y", ["ToyForCausalLM"]) is toy
        assert registry.resolve("Other-1M") is other
        assert [point.loads for point in points] == [1, 1]

    def test_one_module_behind_two_names_registers_once(self):
        module = plugin_module(spec(checkpoints=("Toy-1M", "Toy-2M")))
        registry = ModelRegistry([FakeEntryPoint("Toy-1M", module), FakeEntryPoint("Toy-2M", module)])
        assert registry.resolve("Toy-2M") is registry.resolve("Toy-1M")
        assert [one.name for _, one in registry.specs()].count("toy") == 1

    def test_a_gguf_file_finds_the_model_of_its_unquantized_name(self):
        registry = ModelRegistry([FakeEntryPoint("Toy-1M", plugin_module(spec()))])
        assert registry.resolve("/models/Toy-1M.Q4_K_M.gguf").name == "toy"

    def test_two_claimants_are_an_error_that_names_both(self):
        points = [
            FakeEntryPoint("a", plugin_module(spec("a")), "tritonllm-a"),
            FakeEntryPoint("b", plugin_module(spec("b")), "tritonllm-b"),
        ]
        with pytest.raises(DuplicateModelError, match="'a' of tritonllm-a 1.0 and by 'b' of tritonllm-b 1.0"):
            ModelRegistry(points).resolve("Toy-1M")

    def test_two_distributions_with_one_entry_point_name_are_an_error(self):
        points = [
            FakeEntryPoint("Toy-1M", plugin_module(spec("a")), "tritonllm-a", value="plugin"),
            FakeEntryPoint("Toy-1M", plugin_module(spec("b")), "tritonllm-b", value="plugin"),
        ]
        with pytest.raises(DuplicateModelError, match="tritonllm-a 1.0 and by 'b' of tritonllm-b"):
            ModelRegistry(points).resolve("Toy-1M")

    @pytest.mark.parametrize("name", ["Qwen3-0.6B", "any"])
    def test_a_builtin_is_replaced_only_by_overrides(self, name):
        rival = spec("rival", checkpoints=("Qwen3-0.6B",))
        with pytest.raises(DuplicateModelError, match="built-in"):
            ModelRegistry([FakeEntryPoint(name, plugin_module(rival))]).resolve("Qwen3-0.6B")
        better = spec("better", checkpoints=("Qwen3-0.6B",), overrides=("qwen3",))
        registry = ModelRegistry([FakeEntryPoint(name, plugin_module(better))])
        assert registry.resolve("Qwen3-0.6B") is better
        assert registry.resolve("Qwen3-4B").name == "qwen3"

    def test_mutual_overrides_are_an_error(self):
        rivals = (spec("a", overrides=("b",)), spec("b", overrides=("a",)))
        with pytest.raises(DuplicateModelError):
            ModelRegistry([FakeEntryPoint("both", plugin_module(*rivals))]).resolve("Toy-1M")

    def test_specs_of_this_process_come_first_and_can_be_replaced(self):
        registry = ModelRegistry([FakeEntryPoint("Toy-1M", plugin_module(spec()))])
        mine = spec("mine", architectures=("LlamaForCausalLM",))
        registry.add(mine)
        assert registry.resolve("Toy-1M") is mine
        assert registry.resolve("/tmp/unknown", ["LlamaForCausalLM"]) is mine
        again = spec("mine")
        registry.add(again)
        assert registry.resolve("Toy-1M") is again
        with pytest.raises(PluginError, match="ModelSpec"):
            registry.add("toy")

    BROKEN = (
        ImportError("gone"),
        SyntaxError("bad line"),
        SystemExit(3),
        types.ModuleType("without_hook"),
        plugin_module("no spec"),
    )

    @pytest.mark.parametrize("broken", BROKEN, ids=lambda plugin: type(plugin).__name__)
    @pytest.mark.parametrize("name", ["a-first", "z-last"])
    def test_a_broken_plugin_disturbs_no_other_and_gets_the_blame(self, broken, name):
        good = FakeEntryPoint("middle", plugin_module(spec()))
        registry = ModelRegistry([FakeEntryPoint(name, broken, "tritonllm-broken"), good])
        with pytest.warns(UserWarning, match=f"'{name}' of tritonllm-broken 1.0 failed") as caught:
            assert registry.resolve("Toy-1M").name == "toy"
        assert len(caught) == 1
        errors = {plugin.name: plugin.error for plugin in registry.plugins()}
        assert errors["middle"] is None
        assert errors[name]

    @pytest.mark.parametrize("name", ["a-first", "z-last"])
    def test_a_misspelled_hook_or_parameter_is_blamed_on_its_own_plugin(self, name):
        misspelled, renamed = types.ModuleType("misspelled"), types.ModuleType("renamed")

        @hookimpl
        def tritonllm_register_model(register):
            pass

        @hookimpl
        def tritonllm_register_models(registry):
            pass

        misspelled.tritonllm_register_model = tritonllm_register_model
        renamed.tritonllm_register_models = tritonllm_register_models
        good = FakeEntryPoint("middle", plugin_module(spec()))
        for module, part in ((misspelled, "'tritonllm_register_model'"), (renamed, "{'registry'}")):
            registry = ModelRegistry([FakeEntryPoint(name, module), good])
            words = rf"one hook must be tritonllm_register_models\(register\): [^\n]*{part}[^\n]*; it is skipped\.$"
            with pytest.warns(UserWarning, match=words):
                assert registry.resolve("Toy-1M").name == "toy"

    def test_a_plugin_without_a_model_is_told_what_it_lacks(self):
        unmarked = types.ModuleType("unmarked")
        unmarked.tritonllm_register_models = lambda register: register(spec())
        for module, part in ((unmarked, "define it, marked with @hookimpl"), (plugin_module(), "call register")):
            with pytest.warns(UserWarning, match=part):
                (plugin,) = ModelRegistry([FakeEntryPoint("empty", module)]).plugins()
            assert plugin.specs == ()

    def test_a_reason_is_one_line_and_says_where_in_the_plugin_s_own_package(self, tmp_path, monkeypatch):
        (tmp_path / "plugin_that_fails.py").write_text(
            "import json\nfrom tritonllm import ModelSpec, hookimpl\n\n"
            "if READS:\n    json.loads('{')\n\n\n"
            "@hookimpl\ndef tritonllm_register_models(register):\n    raise ValueError('one\\n\\n  two')\n"
        )

        class OfAFile(FakeEntryPoint):
            def load(self):
                module = types.ModuleType("plugin_that_fails")
                module.READS = self.plugin
                exec((tmp_path / "plugin_that_fails.py").read_text(), vars(module))
                return module

        for reads, error in (
            (True, r"JSONDecodeError: Expecting .* \(plugin_that_fails, line 5\)"),
            (False, r"ValueError: one two \(plugin_that_fails, line 10\)"),
        ):
            with pytest.warns(UserWarning, match=error + "; it is skipped"):
                ModelRegistry([OfAFile("fails", reads, value="plugin_that_fails")]).plugins()

    def test_a_registration_that_fails_half_way_leaves_nothing(self):
        module = types.ModuleType("half")

        @hookimpl
        def tritonllm_register_models(register):
            register(spec())
            raise RuntimeError("half-way")

        module.tritonllm_register_models = tritonllm_register_models
        registry = ModelRegistry([FakeEntryPoint("half", module)])
        with pytest.warns(UserWarning, match="half-way"), pytest.raises(UnknownModelError, match="half-way"):
            registry.resolve("Toy-1M")

    def test_the_warning_is_an_error_for_authors_who_ask_for_it(self):
        registry = ModelRegistry([FakeEntryPoint("broken", ImportError("gone"))])
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            with pytest.raises(UserWarning, match=r"'broken' of tritonllm-toy 1\.0 failed: ImportError: gone"):
                registry.resolve("Toy-1M")

    def test_a_plugin_that_looks_models_up_while_it_is_loaded_finds_itself_absent(self):
        seen = []

        class Curious(FakeEntryPoint):
            def load(self):
                seen.append([(plugin.name, plugin.specs) for plugin in registry.plugins()])
                return super().load()

        other = spec("other", checkpoints=("Other-1M",))
        points = [Curious("a", plugin_module(spec())), FakeEntryPoint("b", plugin_module(other), value="another")]
        registry = ModelRegistry(points)
        assert registry.resolve("Toy-1M").name == "toy"
        assert seen == [[("a", ()), ("b", (other,))]]
        assert [point.loads for point in points] == [1, 1]

    def test_threads_that_look_models_up_at_once_load_each_plugin_once(self):
        class Slow(FakeEntryPoint):
            def load(self):
                time.sleep(0.05)
                return super().load()

        points = [Slow(name, plugin_module(spec(name, checkpoints=(name,))), value=name) for name in "abc"]
        registry = ModelRegistry(points)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert [found.name for found in pool.map(registry.resolve, "abcabc")] == list("abcabc")
        assert [point.loads for point in points] == [1, 1, 1]

    def test_threads_that_come_first_together_share_one_registry(self, monkeypatch):
        def slow(entry_points=None):
            time.sleep(0.02)
            return ModelRegistry([])

        process_registry.cache_clear()
        monkeypatch.setattr("tritonllm.registry.ModelRegistry", slow)
        try:
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda name: tritonllm.register(spec(name)), "abcd"))
            assert [one.name for owner, one in default_registry().specs() if owner == IN_PROCESS] == list("abcd")
        finally:
            process_registry.cache_clear()

    def test_models_may_be_added_while_others_are_looked_up(self, monkeypatch):
        registry = ModelRegistry([])
        registry.add(spec("before"))
        claim = tritonllm.registry._Claim

        def adding(one, owner):  # as another thread may, at any moment
            registry.add(spec(f"during_{one.name}"))
            return claim(one, owner)

        monkeypatch.setattr("tritonllm.registry._Claim", adding)
        assert registry.specs()[0][1].name == "before"
        assert registry.specs()[1][1].name == "during_before"

    def test_conflicts_are_told_before_anybody_looks_a_name_up(self):
        points = [
            FakeEntryPoint("a", plugin_module(spec("a", architectures=("AForCausalLM",))), "tritonllm-a"),
            FakeEntryPoint("b", plugin_module(spec("b", checkpoints=("Toy-1M", "Qwen3-0.6B"))), "tritonllm-b"),
        ]
        qwen, toy = ModelRegistry(points).conflicts()
        assert "'Toy-1M' is claimed by 'a' of tritonllm-a 1.0 and by 'b' of tritonllm-b 1.0" in toy
        assert f"'qwen3' of tritonllm {tritonllm.__version__} (built-in)" in qwen
        better = spec("better", checkpoints=("Qwen3-0.6B",), overrides=("qwen3",))
        assert ModelRegistry([FakeEntryPoint("better", plugin_module(better))]).conflicts() == []

    def test_a_local_folder_named_like_a_hub_id_is_the_same_checkpoint_and_case_matters(self):
        registry = ModelRegistry([FakeEntryPoint("any", plugin_module(spec()))])
        assert registry.resolve("owner/Toy-1M") is registry.resolve("./models/owner/Toy-1M/")
        with pytest.raises(UnknownModelError, match="Close matches: Toy-1M"):
            registry.resolve("owner/toy-1m")

    def test_failing_plugins_are_loaded_and_reported_once(self):
        broken = FakeEntryPoint("broken", ImportError("gone"))
        registry = ModelRegistry([broken])
        with pytest.warns(UserWarning, match="gone"):
            registry.plugins()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            registry.resolve("Qwen3-0.6B")
        assert broken.loads == 1

    def test_the_environment_restricts_plugins(self, monkeypatch):
        points = [
            FakeEntryPoint("Qwen3-0.6B", object(), "tritonllm-engine", value="tritonllm.models"),
            FakeEntryPoint("Toy-1M", plugin_module(spec()), "Tritonllm.Toy"),
            FakeEntryPoint("Other-1M", plugin_module(spec("other")), "tritonllm-other"),
        ]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
        for value, names in [
            (None, ["Other-1M", "Toy-1M"]),
            ("", []),
            ("tritonllm-toy", ["Toy-1M"]),
            (" Other-1M , tritonllm_toy", ["Other-1M", "Toy-1M"]),
        ]:
            monkeypatch.delenv(PLUGINS_VARIABLE, raising=False)
            if value is not None:
                monkeypatch.setenv(PLUGINS_VARIABLE, value)
            assert sorted(point.name for point in ModelRegistry().entry_points) == names
        points[2].dist = types.SimpleNamespace(name=None, version=None)  # half removed: its metadata is gone
        monkeypatch.setenv(PLUGINS_VARIABLE, "Toy-1M")
        assert [point.name for point in ModelRegistry().entry_points] == ["Toy-1M"]
        assert ModelRegistry(points[2:]).plugins()[0].owner == "an unknown distribution"
        monkeypatch.setenv(PLUGINS_VARIABLE, "nothing")
        with pytest.warns(UserWarning, match="nothing"):
            assert ModelRegistry().entry_points == ()


NAMES = ["a", "b", "c"]


@given(
    tables=st.lists(
        st.tuples(
            st.lists(st.sampled_from(["Toy-1M", "Toy-2M", "Qwen3-0.6B"]), max_size=2),
            st.lists(st.sampled_from(["ToyForCausalLM", "LlamaForCausalLM"]), min_size=1, max_size=2),
            st.lists(st.sampled_from([*NAMES, "qwen3", "llama"]), max_size=2),
            st.sampled_from(["Toy-1M", "Qwen3-0.6B", "any"]),
        ),
        min_size=1,
        max_size=3,
    ),
    query=st.tuples(
        st.sampled_from(["Toy-1M", "Qwen3-0.6B", "x"]), st.sampled_from(["ToyForCausalLM", "LlamaForCausalLM"])
    ),
)
def test_the_outcome_does_not_depend_on_the_order_of_discovery(tables, query):
    def outcome(order):
        points = []
        for index in order:
            checkpoints, architectures, overrides, entry = tables[index]
            one = spec(NAMES[index], checkpoints=checkpoints, architectures=architectures, overrides=overrides)
            points.append(FakeEntryPoint(entry, plugin_module(one), f"dist-{NAMES[index]}"))
        try:
            return ModelRegistry(points).resolve(query[0], [query[1]])
        except (UnknownModelError, DuplicateModelError) as error:
            return type(error), str(error)

    orders = list(itertools.permutations(range(len(tables))))
    assert len({outcome(order) for order in orders}) == 1


class TestLoading:
    def test_objects_are_found_by_their_reference(self):
        assert load_object("collections.abc:Iterator.__next__")
        for reference in ("no_such_module_at_all:x", "collections:NoSuchName"):
            with pytest.raises(PluginError, match=reference):
                load_object(reference)

    def test_a_model_class_must_have_the_methods_that_the_engine_calls(self):
        with pytest.raises(PluginError, match="'compute_logits'"):
            load_model_class(spec(model="torch.nn:Linear"))
        with pytest.raises(PluginError, match="no class"):
            load_model_class(spec(model="math:sqrt"))

    def test_a_model_class_must_take_what_the_engine_gives(self, monkeypatch):
        class Right:
            def __init__(self, config, tp, extra=None):
                pass

            def forward(self, *inputs):
                pass

            compute_logits = dict.get  # its signature cannot be asked

        def init(self, config):
            pass

        def forward(self, input_ids, positions, kv_cache, attn, extra):
            pass

        def compute_logits(self):
            pass

        module = types.ModuleType("models_of_a_test")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        module.Right = Right
        assert load_model_class(spec(model="models_of_a_test:Right")) is Right
        for name, method, words in (
            ("__init__", init, r"__init__ of '.*:Wrong' must take \(config, tp\), but too many positional"),
            ("forward", forward, r"\(input_ids, positions, kv_cache, attn\), but missing .*'extra'"),
            ("compute_logits", compute_logits, r"must take \(hidden\), but too many positional arguments\."),
        ):
            module.Wrong = type("Wrong", (Right,), {name: method})
            with pytest.raises(PluginError, match=words):
                load_model_class(spec(model="models_of_a_test:Wrong"))
