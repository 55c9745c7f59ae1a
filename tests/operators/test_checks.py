"""The room of checks: what it stands on, and that the arguments of a call reach it whole."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvkit
from kvkit import KvkitError, checks
from kvkit.errors import CapacityError, DeviceError, argument_error

ROOT = Path(kvkit.__file__).parent


def test_one_place_phrases_errors():
    twin = ROOT.with_name("kvkit_cuda")
    phrased = [
        path for root in (ROOT, twin) for path in root.rglob("*.py") if ": expected {" in path.read_text()
    ]
    assert phrased == [ROOT / "errors.py"]


@pytest.mark.parametrize("kind", [KvkitError, CapacityError, DeviceError])
def test_every_kind_of_error_has_the_one_form(kind):
    error = argument_error("name", "this", "that", kind)
    assert type(error) is kind
    assert str(error) == "name: expected this, got that"


def test_checks_load_numba_with_their_first_pass():
    texts = {path.stem: path.read_text() for path in (ROOT / "checks").glob("*.py")}
    rooms = [name for name, text in texts.items() if "numba" not in text and "kvkit.runtime.jit" not in text]
    modules = ", ".join(f"kvkit.checks.{name}" for name in rooms if name != "__init__")
    program = (
        f"import sys, {modules}; print(sorted(set(sys.modules) & {{'numba', 'kvkit.cpu.attention.prepare'}}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_room_has_no_other_names():
    with pytest.raises(AttributeError, match="nothing"):
        checks.nothing  # noqa: B018


def test_a_tracer_changes_no_argument():
    """Up to Python 3.12 one may add to what `locals()` has returned."""

    def trace(frame, event, argument):
        assert frame.f_locals is not None
        return trace

    tokens, cache = np.ones((1, 2, 1, 4), np.float32), np.zeros((1, 1, 2, 8, 1, 4), np.float32)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        key, _ = kvkit.key_value_cache(tokens, tokens, 0, cache)
        output = kvkit.multi_head_cache_attention(tokens, tokens, tokens, 2, cache, num_heads=1, head_dim=4)
        step = kvkit.dynamic_batching.plan([0, 2], [0, 2], [0], [0])
        planned = step.multi_head_cache_attention(
            tokens[0], tokens[0], tokens[0], cache[:, 0].reshape(1, 2, 8, 1, 4), num_heads=1, head_dim=4,
            cache_layout=2,
        )  # fmt: skip
    finally:
        sys.settrace(before)
    assert (key == 1).all()
    assert (output == 1).all()
    assert (planned == 1).all()
