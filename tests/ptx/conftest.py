"""What kernels are compiled for."""

import pytest

TARGETS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]  # those that the package supports
QUICK = [(8, 0), (9, 0)]
OTHERS = [each for each in TARGETS if each not in QUICK]


@pytest.fixture(params=[QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["", "others"])
def capabilities(request):
    """Return compute capabilities: the first of two generations, or, in slow tests, the others."""
    return request.param
