"""Choose what runs the operators in a process: `kvkit`, or `kvkit_cuda` on a device that this machine has.

`pytest --backend` chooses, once and before anything imports Numba, which then simulates a device or does not.
"""

import importlib
import os
import re
import sys

import kvkit

DEVICE = (
    "arrays", "ascend", "ascend_attention", "attention", "cache", "decode", "outputs", "paged",
    "plan", "positions", "prefill", "random", "recurrent", "scan", "tensor_cores",
)  # fmt: skip
# The CPU's suites that kvkit_cuda passes too, and those of them that take long in the simulator.
SHARED = ("refusals", "wrong_calls", "key_value_cache_errors", "ascend_vectors", "stored_formats")
SLOW = (
    "attention_vectors", "key_value_cache", "positions", "random_calls", "ascend", "ascend_attention",
    "ascend_blocks", "ascend_errors", "ascend_means", "ascend_properties",
)  # fmt: skip
# The machine that runs PTX compiles for a minute, so that few kernels of each kind are quick.
MACHINE = {
    "test_device_arrays": [r"\[(cache|cache of floats|blocks (nd|nz|kvhead|rope|omni))-interface"],
    "test_device_attention": [r"test_what_weighs_keys.*plain"],
    "test_device_decode": [r"test_groups_of_copies"], "test_device_latent": [r"test_splits_with_sinks"],
    "test_device_paged": [], "test_device_positions": [r"test_rotary_in_place"],
    "test_device_recurrent": [r"test_steps.*5.*heads-KV", r"test_prompts_side_by_side"],
    "test_device_prefill": [r"test_product", r"matrices", r"rounded", r"powers"],
    "test_device_scan": [r"test_rows_that_look_wrong_but_are_legal"], "test_device_mutants": [r"test_scan"],
    "test_device_tensor_cores": [r"test_contexts.*(decode-100|prefill-40)-fp16"], "test_device_twin": [],
    "test_stored_formats": [],
}  # fmt: skip
STAND_IN = {
    "test_device_driver": [""],
    "test_device_twin": [r"test_results_stay_on_the_device"],
}
QUICK = {  # by backend and file, what is not slow there
    "simulator": {f"test_device_{name}": [""] for name in DEVICE}
    | {"test_device_latent": [r"finite.*nan|general"]}
    # What attributes may not be is said by the CPU's own `def`s, before a device is asked for anything.
    | {f"test_{name}": [r"^(?!.*(v15_attention|test_attributes))"] for name in SHARED}
    | {f"test_{name}": [] for name in SLOW},
    "machine": MACHINE,
    "stand_in": {f"test_device_{name}": [] for name in ("decode", "prefill", "tensor_cores")} | STAND_IN,
    "gpu": {f"test_device_{name}": [""] for name in ("decode", "latent", "prefill", "tensor_cores", "twin")},
}
PLUGINS = {"simulator": "simulator", "machine": "cuda_machine", "stand_in": "stand_in"}
NAMES = ("cpu", *QUICK)
name, operators = "cpu", kvkit


def use(chosen):
    """Make scenes run the operators of a backend from now on."""
    global name, operators
    name = chosen
    if chosen != "cpu":
        assert not {"numba", "kvkit_cuda"} & set(sys.modules)
        os.environ["NUMBA_ENABLE_CUDASIM"] = str(int(chosen == "simulator"))
        operators = importlib.import_module("kvkit_cuda")


def collects(module):
    """Return whether a module has tests for the backend."""
    if name == "cpu":
        return not module.startswith("test_device_")
    return module in QUICK[name]


def sort(items):
    """Return (items of other backends, items that are slow on this one, names of tests that it lacks)."""
    if name == "cpu":
        return [], [], []
    others = [item for item in items if item.get_closest_marker("cpu")]
    slow, missing = [], []
    for module, words in QUICK[name].items():
        here = [item for item in items if item.path.stem == module and item not in others]
        quick = {item for item in here if any(re.search(word, item.nodeid) for word in words)}
        slow += [item for item in here if item not in quick]
        missing += [
            word or module for word in words if not any(re.search(word, item.nodeid) for item in here)
        ]
    return others, slow, missing
