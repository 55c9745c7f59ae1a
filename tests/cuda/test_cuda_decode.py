"""The suite of `cuda_decode.py` in the simulator."""

import pytest
from test_cuda import simulated


def test_in_the_simulator():
    assert simulated("cuda_decode.py", "-m", "not slow") > 30


@pytest.mark.slow
def test_the_rest_in_the_simulator():
    assert simulated("cuda_decode.py", "-m", "slow") > 3
