"""The suite of `cuda_prefill.py` in the simulator."""

import pytest
from test_cuda import simulated


def test_in_the_simulator():
    assert simulated("cuda_prefill.py", "-m", "not slow") > 30


@pytest.mark.slow
def test_the_rest_in_the_simulator():
    assert simulated("cuda_prefill.py", "-m", "slow") > 10
