"""One hypothesis profile: the same examples in every run, and no deadline, for the first call compiles."""

import importlib.util
import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvkit",
    derandomize=True,
    deadline=None,
    max_examples=30,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("kvkit")

# Their imports need the extra `transformers`, which `make test-transformers` installs.
collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_transformers*.py"]

if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    import simulator

    simulator.prepare()
