"""What kernels are compiled for."""

import pytest

# Those that the package supports: the first of the generations that there are, quickly, then the others.
TARGETS = [(8, 0), (9, 0)], [(8, 6), (8, 9), (10, 0), (12, 0)]


@pytest.fixture(params=[TARGETS[0], pytest.param(TARGETS[1], marks=pytest.mark.slow)], ids=["", "others"])
def capabilities(request):
    """Some of the compute capabilities."""
    return request.param
