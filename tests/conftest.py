"""Define fixtures of all tests: the backend that runs the operators, random numbers, guarded memory."""

import gc
import importlib.util

import backends
import numpy as np
import pytest
import surroundings
from hypothesis import HealthCheck, settings

# The same examples in every run, and no deadline, for the first call compiles.
settings.register_profile(
    "kvkit", derandomize=True, deadline=None, max_examples=30, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
settings.load_profile("kvkit")

# Their imports need the extra `transformers`, which `make test-transformers` installs.
HAVE_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
collect_ignore_glob = [] if HAVE_TRANSFORMERS else ["integrations/test_transformers*.py"]


@pytest.fixture
def rng(request):
    """Return a generator of random numbers that differ between tests and are the same in every run."""
    return np.random.default_rng(sum(request.node.name.encode()))


@pytest.fixture(scope="session")
def backend():
    """Return the package whose operators are tested: kvkit, or kvkit_cuda if `--backend` names a device."""
    return backends.operators


@pytest.fixture
def microsecond():
    """Return the unit of limits on the time of calls, in seconds: longer than 1e-6 if Python is slow here."""
    return max(1.0, surroundings.pace() / 20e-6) * 1e-6


@pytest.fixture
def poison():
    """Yield a maker of outputs full of 0xFF, amid memory that must not have changed when the test ends."""
    memory = surroundings.Poison()
    yield memory
    memory.check()


@pytest.fixture
def no_prints(monkeypatch):
    """Leave pictures for print empty, which take as long as the others of a study."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    save = figure.savefig

    def save_svg(self, *arguments, **options):
        if options.get("format") != "png":
            save(self, *arguments, **options)

    monkeypatch.setattr(figure, "savefig", save_svg)


def pytest_addoption(parser):
    about = "what runs the operators; `gpu` is a device, the others need none"
    parser.addoption("--backend", choices=backends.NAMES, default="cpu", help=about)
    parser.addoption("--thorough", action="store_true", help="try all random examples, not a quarter of them")


def is_odd(config):
    """Return whether this is the second, the fourth ... worker process of pytest-xdist."""
    return getattr(config, "workerinput", {}).get("workerid", "gw0")[-1] in "13579"


def pytest_configure(config):
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # workers import what runs the operators
    backends.use(config.getoption("backend"))
    surroundings.thorough = config.getoption("thorough")
    if backends.name in backends.PLUGINS:
        config.pluginmanager.import_plugin(backends.PLUGINS[backends.name])


def pytest_ignore_collect(collection_path, config):
    name = collection_path.stem
    if name.startswith("test_transformers") and "not transformers" in config.option.markexpr:
        return True  # its import takes longer than that of all others
    return True if name.startswith("test_") and not backends.collects(name) else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Collect folders from their ends in odd workers, which find the bytecode of the other half of files."""
    report = yield
    if isinstance(collector, pytest.Dir) and is_odd(collector.config):
        report.result.reverse()
    return report


def pytest_collection_finish(session):
    """Let collections of garbage pass over all tests: a full one takes a quarter of a second with them."""
    gc.collect()
    gc.freeze()


class Lost(pytest.Item):
    """Stands for tests that the backend should have."""

    def runtest(self):
        pytest.fail(f"the backend {backends.name} has no tests {self.name}", pytrace=False)

    def reportinfo(self):
        return self.path, None, self.name


@pytest.hookimpl(tryfirst=True)  # before -m looks at what is slow
def pytest_collection_modifyitems(session, config, items):
    items.sort(key=lambda item: item.path.parts)
    others, slow, missing = backends.sort(items)
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
    if config.args_source is not config.ArgsSource.ARGS:
        items += [Lost.from_parent(session, name=name) for name in missing]
    for item in slow:
        item.add_marker("slow")
