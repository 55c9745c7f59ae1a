"""The house as CONTRIBUTING.md draws it, read from what files import: floors, no circles, nothing hidden."""

import subprocess
import sys

import pytest
from house import FILES, imported

# From the ground up: a file imports what lies in lines above its own, or in its own room.
FLOORS = (
    "errors typed version reference",  # 0
    "runtime",  # 1
    "formats",
    "interop",
    "layouts",
    "operators",
    "formulas",  # 2
    "models",
    "checks",  # 3
    "cpu",  # 4
    "calls rope",  # 5
    "ascend static dynamic_batching paged planned_pages merge",
    "mla indexer recurrent compressed",
    "__init__",
    "files eviction",  # 6
    "cache",
    "tools",
    "integrations",  # 7
    "cli",
    "__main__",  # `python -m kvkit`
)
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms.split()}
# What the twin on CUDA has from floors above 3: functions that make index tensors; names, arguments, words;
# frequencies and angles, which have the CPU's bits because they are the CPU's; latent rows.
OF_THE_HOST = {
    ("kvkit_cuda.ascend", "kvkit.ascend"), ("kvkit_cuda.calls.checks", "kvkit.calls.targets"),
    ("kvkit_cuda.names", "kvkit"), ("kvkit_cuda.positions.angles", "kvkit.cpu"),
    ("kvkit_cuda.calls.latent", "kvkit.calls.indexer"), ("kvkit_cuda.calls.latent", "kvkit.calls.latent"),
}  # fmt: skip
# Imports in functions, by file, and why they are not at its top.
LATE = {
    "kvkit_cuda.device_runtime.device": {"numba.cuda"},  # the simulator has none of these
    "kvkit_cuda.warm": {"kvkit_cuda.device_runtime"},  # nor these
    "kvkit_cuda.device_runtime.host": {"numba.cuda.cudadrv", "cuda.core.utils"},
    "kvkit_cuda.device_runtime.compiled": {"cuda.bindings", "cuda.pathfinder", "numba_cuda"},
    "kvkit_cuda.device_runtime.needs": {
        "kvkit.formulas",
        "numba",
        "numba.cuda.cudadrv",
        "cuda.core",
    },  # known to be there by then
    "kvkit.tools.comparison": {"matplotlib", "matplotlib.figure"},  # optional
    "kvkit.tools.vectors.exporting": {"onnx"},  # optional
    "kvkit.tools.studies.plots": {"matplotlib", "matplotlib.figure", "matplotlib.ticker"},  # optional
    "cli.__main__": {"kvkit_cli.main", "signal"},  # an early Ctrl-C ends a run in a line
    "cli.clusters": {"kvkit.integrations.dask"},  # optional
    "cli.info": {"kvkit_cuda.device_runtime"},  # the others: a verb loads what it needs, and no more
    "cli.main": {"kvkit.errors", "kvkit.operators", "kvkit_cli", "kvkit_cli.show", "runpy"},
    "cli.study": {"kvkit.integrations.transformers", "transformers", "transformers.utils.logging"},
    "cli.warm": {"kvkit_cuda.device_runtime"},
    "cli.warming": {"kvkit_cuda"},
    "cli.run": {"numba"},
}


def room(module):
    """Return the room of kvkit, or the other package, that a module is in."""
    package, _, rest = module.partition(".")
    if package != "kvkit" or rest in FLOOR:
        return rest if package == "kvkit" else package
    return rest.partition(".")[0] or "__init__"


def test_every_room_has_a_floor():
    assert {room(name) for name in FILES} - {"kvkit_cuda"} <= set(FLOOR)


def may_import(name, module):
    """Return whether a module is in the room of another one, or on a floor below it."""
    if room(module) == room(name):
        return True
    if room(name) == "kvkit_cuda":
        return FLOOR[room(module)] <= FLOOR["checks"] or (name, module) in OF_THE_HOST
    if room(module) == "kvkit_cuda":
        return room(name) == "cli"
    return FLOOR[room(module)] < FLOOR[room(name)]


def test_floors():
    """A file imports from floors below its own, or from its own room."""
    inside = {(name, module) for name in FILES for module, *_ in imported(name) if module in FILES}
    assert len(inside) > 1000
    assert [f"{name} imports {module}" for name, module in inside if not may_import(name, module)] == []


def test_the_reference_shares_nothing_with_the_package():
    """It is what the package is compared with."""
    own = {name for name in FILES if f"{name}.".startswith("kvkit.reference.")}
    packages = {package.partition(".")[0] for name in own for _, package, _ in imported(name)}
    assert {module for name in own for module, *_ in imported(name) if module in FILES} <= own
    assert packages <= {"kvkit", "numpy", "ml_dtypes"} | set(sys.stdlib_module_names)
    assert len(own) > 7


def test_imports_stand_at_the_top():
    late = {name: {package for _, package, inside in imported(name) if inside} for name in FILES}
    assert {name: packages for name, packages in late.items() if packages} == LATE


def test_kvkit_knows_neither_cuda_nor_the_command_line():
    for name in FILES:
        if name.partition(".")[0] == "kvkit" and name != "kvkit.__main__":
            for module, *_ in imported(name):
                assert not f"{module}.".startswith(
                    ("kvkit_cuda.", "kvkit_cli.", "cli.", "numba.cuda.", "cuda.", "click.")
                )


SCRIPT = """
import sys
import {package}
print([name for name in sys.modules if name.partition(".")[0] in ("numba", "llvmlite", "cuda")])
"""


@pytest.mark.parametrize("package", ["kvkit", "kvkit.cache", "kvkit_cuda"])
def test_importing_loads_no_numba(package):
    command = [sys.executable, "-c", SCRIPT.format(package=package)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
