"""The suite of `cuda_prefill.py` in the simulator."""

from test_cuda import simulated


def test_in_the_simulator():
    assert simulated("cuda_prefill.py") > 40
