"""The public face: what dir() and help() show, what an import loads, and the types of what is there."""

import importlib
import inspect
import json
import os
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvkit
import kvkit_cuda
from kvkit import typed
from kvkit.cache.base import BaseCache, BaseLayer
from kvkit.errors import nearest
from kvkit.operators import OPERATORS
from kvkit_cli.main import VERBS

ROOT = Path(__file__).parents[2]
ROOMS = ["cache", "eviction", "files", "formats", "integrations", "layouts", "tools"]
MODULES = kvkit.ascend, kvkit.cache, kvkit.dynamic_batching, kvkit_cuda
HELPERS = kvkit.ascend.compressed_slots, kvkit.ascend.razor_windows, kvkit.ascend.slots
METHODS = [
    getattr(kind, name)
    for kind in (kvkit.dynamic_batching.Plan, kvkit.ascend.Slots)
    for name, _ in inspect.getmembers(kind, inspect.isfunction)
    if not name.startswith("_")
]
CLASSES = [kind for kind in map(kvkit.cache.__dict__.get, kvkit.cache.__all__) if inspect.isclass(kind)]
CACHES = [  # what every cache and layer does, and how each is made
    getattr(kind, name)
    for kind in CLASSES
    for base in (BaseCache, BaseLayer)
    for name, _ in inspect.getmembers(base, inspect.isfunction)
    if issubclass(kind, base) and not name.startswith("_") and name != "stored"
]
CACHES += [kind.__init__ for kind in CLASSES if inspect.isfunction(kind.__init__)]
FUNCTIONS = [*(op.function() for op in OPERATORS.values()), *HELPERS, kvkit.dynamic_batching.plan, *METHODS]
FUNCTIONS += list({function.__qualname__: function for function in [*CACHES, kvkit.cache.load]}.values())


def test_dir_is_the_face():
    assert dir(kvkit) == sorted([*kvkit.__all__, *ROOMS])
    for module in MODULES:
        assert dir(module) == sorted(module.__all__)


def test_help_begins_with_a_map():
    """All that dir() shows, the GPU twin and the command line, in half a screen."""
    text = inspect.getdoc(kvkit)
    assert len(text.splitlines()) <= 25
    for name in (*dir(kvkit), "kvkit_cuda", "kvkit --help"):
        assert name in text or name == "__version__"
    for verb in ("list", "describe"):
        assert f"`kvkit {verb}" in text
        assert verb in VERBS


LOADED = """
import json, sys, time
begin = time.process_time()
import numpy, ml_dtypes
middle = time.process_time()
import kvkit
end = time.process_time()
before = [name for name in ("numba", "llvmlite", "kvkit.cache", "kvkit.integrations") if name in sys.modules]
kvkit.cache.DynamicCache, kvkit.integrations, kvkit.tools
tools = [name for name in sys.modules if name.startswith("kvkit.tools.")]
after = [name for name in ("numba", "llvmlite", "onnx", "torch") if name in sys.modules]
try:
    kvkit.nothing
except AttributeError as error:
    print(json.dumps([before, after + tools, str(error), (end - middle) / (middle - begin)]))
"""


def loaded(**variables: str) -> tuple[list[str], list[str], str, float]:
    """Run LOADED in a process of its own, with these environment variables."""
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_rooms_load_when_they_are_used():
    before, after, error, _ = loaded()
    assert (before, after) == ([], [])
    assert error == "module 'kvkit' has no attribute 'nothing'"


NEAR = {"DynamcCache": "DynamicCache", "quantizedcache": "QuantizedCache", "RoPE": "Rope", "chek": "check"}
NEAR |= {"KeyValueCache": "key_value_cache", "ReshapeAndCache": "kvkit.ascend.reshape_and_cache"}
NEAR |= {"Static_Layer": "kvkit.cache.StaticLayer", "Cache": "kvkit.cache.Cache"}


@pytest.mark.parametrize("name", NEAR)
def test_a_wrong_name_is_answered_with_the_near_one(name):
    with pytest.raises(AttributeError, match=f"did you mean '{NEAR[name]}'"):
        getattr(kvkit, name)


def test_names_of_specifications_are_answered_in_their_rooms():
    for room, name, near in (
        (kvkit.ascend, "ReshapeAndCache", "reshape_and_cache"),
        (kvkit.dynamic_batching, "MultiHeadCacheAttention", "multi_head_cache_attention"),
    ):
        with pytest.raises(AttributeError, match=f"did you mean '{near}'"):
            getattr(room, name)


@pytest.mark.parametrize("name", kvkit.DEEPER)
def test_deeper_names_are_where_the_error_says(name):
    module = kvkit.DEEPER[name]
    if module == "kvkit.integrations.transformers":
        pytest.importorskip("transformers")
    assert hasattr(importlib.import_module(module), name)


def called_by_name(module: Any) -> list[Any]:
    """Return the functions and classes of a module that take arguments by name, without those of results."""
    found = [getattr(module, name) for name in module.__all__]
    results = kvkit.PagedPlan, kvkit.dynamic_batching.Plan, kvkit.ascend.Slots, kvkit.ascend.CompressType
    callables = [
        each for each in found if callable(each) and each not in results and each is not kvkit.mla_scale
    ]
    others = Exception, types.ModuleType  # kvkit.draw is a module that says what to call
    return [
        each for each in callables if not issubclass(each if inspect.isclass(each) else type(each), others)
    ]


@pytest.mark.parametrize(
    "function",
    [
        *called_by_name(kvkit), *called_by_name(kvkit.ascend), *called_by_name(kvkit.dynamic_batching),
        kvkit.cache.Cache, kvkit.cache.GatedDeltaLayer, kvkit.cache.QuantSpec, kvkit.cache.StaticLayer,
    ], ids=lambda function: f"{function.__module__}.{function.__qualname__}",
)  # fmt: skip
def test_a_wrong_keyword_is_answered_with_the_near_one(function):
    right = list(inspect.signature(function).parameters)[-1]
    with pytest.raises(TypeError, match=f"(?i)did you mean '?{right}'?"):
        function(**{f"{right}_": None})


CACHE = kvkit.DynamicCache(1)
OTHER_WORDS = {  # {a word of before, or of another library: (a call with it, the right one)}
    "scale": (kvkit.paged_attention, "softmax_scale"), "seq_lens": (kvkit.paged_plan, "context_lens"),
    "block_size": (kvkit.PagedCache, "page_size"), "page_size": (kvkit.ascend.slots, "block_size"),
    "sliding_window": (kvkit.DynamicCache, "window"), "nbits": (kvkit.QuantizedCache, "format"),
    "bits": (kvkit.cache.QuantSpec, "format"), "cache_kwargs": (CACHE.update, "cache_position"),
    "heads": (kvkit.cache.GatedDeltaLayer, "num_heads"), "attention_mask": (CACHE.attend, "attn_mask"),
    "max_length": (CACHE.crop, "length"), "offloading": (kvkit.StaticCache, "offload"),
}  # fmt: skip


@pytest.mark.parametrize("word", OTHER_WORDS)
def test_a_word_of_elsewhere_is_answered_with_kvkits(word):
    call, right = OTHER_WORDS[word]
    first = [np.ones((1, 2, 3, 8), np.float32)] * 2 + [0] if call == CACHE.update else []
    first = [np.ones((1, 2, 3, 8), np.float32), 0] if call == CACHE.attend else first
    with pytest.raises(TypeError, match=rf"\(did you mean {right}\?\)"):
        call(*first, **{word: 1})


def test_names_of_two_letters_are_not_looked_for_inside_others():
    assert (nearest("np", ["input"]), nearest("inp", ["input"])) == ([], ["input"])


def test_what_comes_after_the_last_position_is_given_by_name():
    with pytest.raises(TypeError, match=r"\(by name: num_heads, head_dim, is_causal, is_alibi\)$"):
        kvkit.multi_head_attention(*range(5))


def test_what_transformers_has_and_kvkit_says_otherwise():
    with pytest.raises(TypeError, match=r"kvkit\.cache\.from_config\(config\)"):
        kvkit.DynamicCache(config={})
    for name, hint in ("max_cache_len", r": it is get_max_cache_shape\(\) here$"), ("zz", "$"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'{hint}"):
            getattr(kvkit.StaticCache(8), name)
    with pytest.raises(kvkit.KvkitError, match=r"^cache_position: .* got dict of 1 elements"):
        CACHE.update(*np.ones((2, 1, 2, 3, 8), np.float32), 0, {"cache_position": np.arange(3)})
    with pytest.raises(kvkit.KvkitError, match=r"^offload: expected a folder .* got int 0"):
        CACHE.offload(0)


def test_caches_and_tools_are_at_hand():
    """The names at the top are those of the rooms, not copies."""
    assert all(getattr(kvkit, name) is getattr(kvkit.cache, name) for name in kvkit.CACHES)
    assert all(getattr(kvkit, name) is getattr(kvkit.tools, name) for name in kvkit.TOOLS)


@pytest.mark.perf
def test_an_import_takes_less_than_that_of_numpy(tmp_path):
    """Both have bytecode, as after an installation: without it kvkit would be compiled at each import."""
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert min(loaded(**bytecode)[-1] for _ in range(5)) < 1


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_every_argument_has_a_type(function):
    hints = typing.get_type_hints(function)
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    assert sorted(hints) == sorted([*names, "return"])


def test_types_tell_arrays_from_numbers():
    hints = typing.get_type_hints(kvkit.multi_head_cache_attention)
    assert hints["query"] == typed.Array
    assert (hints["num_heads"], hints["is_causal"], hints["softcap"]) == (int, bool, float)
    assert typing.get_args(hints["quant_bit"]) == (0, 4, 8)
    assert hints["scale"] == typed.Array | None


@pytest.mark.parametrize(
    ("file", "printed"), [("typical", "num_heads: expected an integer from 1"), ("caches", "[0]")]
)
def test_typical_use_runs(file, printed):
    """The files that the type checkers read."""
    path = ROOT / "tests" / "typing" / f"{file}.py"
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    assert printed in done.stdout
