"""What operators of kvkit_cuda have from kvkit's: names, arguments, words, types; and what that costs."""

import inspect
import pickle
import pkgutil
import re
import statistics
import time
from types import SimpleNamespace

import pytest

import kvkit
import kvkit_cuda
from kvkit.operators import OPERATORS
from kvkit_cuda import mirror, print_stubs

PLANS = "dynamic_batching.plan", "paged_plan"
METHODS = [f"dynamic_batching.Plan.{name}" for name in ("key_value_cache", "multi_head_cache_attention")]
METHODS += [f"PagedPlan.{name}" for name in ("paged_append", "paged_attention")]


def found(package, path):
    for name in path.split("."):
        package = getattr(package, name)
    return package


@pytest.fixture(params=[*OPERATORS, *PLANS, *METHODS])
def pair(request):
    """Return (function of kvkit, function of kvkit_cuda)."""
    return found(kvkit, request.param), found(kvkit_cuda, request.param)


def test_every_operator_has_a_twin_of_its_own(pair):
    function, twin = pair
    assert inspect.isfunction(twin)
    assert twin is not function
    assert twin.__name__ == function.__name__
    assert twin.__qualname__ == function.__qualname__


def test_twins_are_found_by_their_names(pair):
    assert pickle.loads(pickle.dumps(pair[1])) is pair[1]


def test_twins_explain_what_differs(pair):
    """The words are the function's, but for examples, which are of the twin, and what a device adds."""
    own, words = (inspect.getdoc(each) for each in pair)
    summary, about, *rest = words.split("\n\n")
    assert summary == own.partition("\n\n")[0]
    assert "on a CUDA device" in about
    for section in own.partition("\n\n")[2].split("\n\n"):
        assert section.replace("Raises\n------\n", "") in "\n\n".join(rest).replace("kvkit_cuda", "kvkit")
    assert "import kvkit\n" not in words
    for name in re.findall(r"\bkvkit(?:_cuda)?(?:\.\w+)+", words):
        assert pkgutil.resolve_name(name) is not None
    assert not re.search(rf"\bkvkit\.{pair[1].__qualname__}\b", "\n\n".join(rest))
    if "Parameters\n---" in own:
        parameters, raises = (words.partition(name)[2] for name in ("Parameters\n---", "Raises\n---"))
        assert "\nstream : optional\n" in parameters.partition("Returns\n---")[0]
        assert "\nDeviceError\n" in raises.partition("\n\n")[0]


def refused(function, *args, **kwargs):
    with pytest.raises(TypeError) as error:
        function(*args, **kwargs)
    return str(error.value)


def test_wrong_arguments_are_refused_in_the_words_of_python(pair, monkeypatch):
    monkeypatch.setattr(mirror, "kernels", None)
    function, twin = pair
    parameters = inspect.signature(function).parameters.values()
    positional = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    everything = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
    too_many, named = [0] * (len(positional) + 1), {each.name: 0 for each in positional}
    wrongs = [
        ((), {"shape": 1}), ((), {}), (too_many, {}), (too_many, everything),
        ((), named | everything | {"shape": 1}),
    ]  # fmt: skip
    if positional:
        wrongs.append(((0,), named | everything))
        wrongs.append(((), everything))
    for args, kwargs in wrongs:
        expected = refused(function, *args, **kwargs)
        assert refused(twin, *args, **kwargs) == expected
        assert refused(twin, *args, **kwargs, stream=None) == expected
    assert "shape" in refused(twin, *[0] * len(positional), **everything, shape=1)


@pytest.fixture
def bound(monkeypatch):
    """Return the arguments that functions of kvkit_cuda pass on."""
    calls = []
    monkeypatch.setattr(mirror, "kernels", lambda: SimpleNamespace(call=lambda *call: calls.append(call)))
    return calls


def test_arguments_have_their_names_and_defaults(pair, bound):
    function, twin = pair
    parameters = inspect.signature(function).parameters
    required = {each.name: object() for each in parameters.values() if each.default is each.empty}
    order = [name for name in required if parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    by_name = {name: required[name] for name in required if name not in order}
    defaults = {each.name: each.default for each in parameters.values() if each.name not in required}
    stream = object()
    for args, kwargs in (((), required), ([required[name] for name in order], by_name)):
        twin(*args, **kwargs, stream=stream)
        _, values = bound.pop()
        assert values.pop("stream") is stream
        assert values.pop("check", True) is True
        assert values.pop("into", None) is None
        assert values == defaults | required


@pytest.mark.perf
@pytest.mark.parametrize("path", ["key_value_cache", "dynamic_batching.multi_head_cache_attention"])
@pytest.mark.parametrize("by_name", [False, True])
def test_binding_takes_under_5_microseconds(path, by_name, monkeypatch, microsecond):
    """All that a twin does but for what kernels do: the median of many calls, once nothing else runs."""
    monkeypatch.setattr(mirror, "kernels", lambda: SimpleNamespace(call=lambda path, values: None))
    twin = found(kvkit_cuda, path)
    parameters = inspect.signature(twin).parameters.values()
    args = [0 for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD and not by_name]
    kwargs = {each.name: 0 for each in list(parameters)[len(args) :]}

    def cost():
        times = []
        for _ in range(200):
            begin = time.perf_counter()
            twin(*args, **kwargs)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    until = time.perf_counter() + 5
    while cost() > 5 * microsecond:
        assert time.perf_counter() < until


@pytest.mark.parametrize("path", print_stubs.stubs(), ids=lambda path: path.stem)
def test_stubs_are_current(path):
    """`python -m kvkit_cuda.print_stubs` prints them."""
    assert path.read_text() == print_stubs.stubs()[path]
