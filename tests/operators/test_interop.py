"""Operators on arrays that are not numpy's: the same memory, the same bits, results in kind."""

import importlib
import subprocess
import sys
import timeit

import ml_dtypes
import numpy as np
import pytest

import kvkit
from kvkit import KvkitError
from kvkit.interop import as_numpy, returns_input_kind

attend = returns_input_kind(kvkit.multi_head_attention)
append = returns_input_kind(kvkit.multi_head_cache_attention)
merge = returns_input_kind(kvkit.merge_attention_states)
store, load = (
    returns_input_kind(kvkit.ascend.reshape_and_cache),
    returns_input_kind(kvkit.ascend.paged_cache_load),
)
HEADS = {"num_heads": 4, "head_dim": 16, "num_kv_heads": 2}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
dtypes = pytest.mark.parametrize("dtype", DTYPES)


class Capsule:
    """Stands for an array that has only DLPack."""

    def __init__(self, array, place=None):
        self.array, self.place = array, place

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.place or self.array.__dlpack_device__()


@pytest.fixture
def torch():
    return importlib.import_module("torch")


def tensor(torch, array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def numbers(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(DTYPES[dtype])


def same(ours, theirs):
    assert as_numpy(ours).dtype == theirs.dtype
    assert as_numpy(ours).tobytes() == theirs.tobytes()


@dtypes
@pytest.mark.transformers
def test_tensors(torch, dtype):
    """Results of the kind of the first argument, of the same bits; whatever the others are."""
    arrays = [numbers(i, 2, 5, heads, 16, dtype=dtype) for i, heads in enumerate((4, 2, 2))]
    expected = attend(*arrays, return_lse=True, **HEADS)
    tensors = [tensor(torch, array) for array in arrays]
    for given, kind in (
        (tensors, torch.Tensor),
        ([tensors[0], *arrays[1:]], torch.Tensor),
        ([arrays[0], *tensors[1:]], np.ndarray),
    ):
        for ours, theirs in zip(attend(*given, return_lse=True, **HEADS), expected, strict=True):
            assert isinstance(ours, kind)
            same(ours, theirs)
    strided = tensors[0].transpose(1, 2).contiguous().transpose(1, 2)
    same(attend(strided.requires_grad_(dtype == "float32"), *tensors[1:], **HEADS), expected[0])
    mask = torch.zeros(5, 5, dtype=torch.bool)
    same(attend(*tensors, attn_mask=mask.logical_not(), **HEADS), expected[0])


@dtypes
@pytest.mark.transformers
def test_caches_change_in_place(torch, dtype):
    new = [numbers(i, 1, 3, heads, 16, dtype=dtype) for i, heads in enumerate((4, 2, 2))]
    cache = np.zeros((1, 1, 2, 8, 2, 16), DTYPES[dtype])
    theirs = tensor(torch, cache)
    expected = append(*new, 0, cache, **HEADS)
    out = torch.empty(1, 3, 4, 16, dtype=theirs.dtype)
    assert append(*(tensor(torch, array) for array in new), 0, theirs, out=out, **HEADS) is out
    same(out, expected)
    same(theirs, cache)
    assert theirs.count_nonzero()


@pytest.mark.transformers
def test_what_is_given_is_returned(torch):
    caches = torch.zeros(4, 2, 1, 8), torch.zeros(4, 2, 1, 8)
    key, slots = torch.ones(3, 1, 8), torch.tensor([5, -1, 0])
    stored = store(key, 2 * key, *caches, slots)
    assert stored[0] is caches[0]
    assert stored[1] is caches[1]
    found = load(caches[0], None, torch.tensor([[0, 2]], dtype=torch.int32), torch.tensor([4]))
    assert found[0][:, 0, 0].tolist() == [1, 0, 0, 1]
    assert found[1] is None


@pytest.mark.transformers
def test_sequences_of_tensors(torch):
    parts, lses = [numbers(i, 3, 2, 8) for i in range(2)], [numbers(9 + i, 3, 2) for i in range(2)]
    expected = merge(parts, lses)
    out = torch.empty(3, 2, 8), torch.empty(3, 2)
    given = [tensor(torch, array) for array in parts], [tensor(torch, array) for array in lses]
    for results in (merge(*given), merge(*given, out=out)):
        for ours, theirs in zip(results, expected, strict=True):
            assert isinstance(ours, torch.Tensor)
            same(ours, theirs)
    same(out[0], expected[0])


def test_capsules():
    """Of these results are numpy's."""
    arrays = [numbers(i, 2, 5, heads, 16) for i, heads in enumerate((4, 2, 2))]
    expected = attend(*arrays, **HEADS)
    got = attend(*map(Capsule, arrays), **HEADS)
    assert isinstance(got, np.ndarray)
    same(got, expected)
    cache = np.zeros((1, 1, 2, 8, 2, 16), np.float32)
    append(Capsule(arrays[0][:1]), Capsule(arrays[1][:1]), Capsule(arrays[2][:1]), 0, Capsule(cache), **HEADS)
    assert cache[0, 0, 0, :5].tobytes() == arrays[1][0].tobytes()


@pytest.mark.transformers
def test_refused(torch):
    query, key = numbers(0, 2, 5, 4, 16), numbers(1, 2, 5, 2, 16)
    device = Capsule(query, (2, 0))
    with pytest.raises(KvkitError, match=r"^query: expected an array on the CPU .*, got one on device 2:0"):
        attend(device, key, key, **HEADS)
    with pytest.raises(KvkitError, match=r"^value: expected an array on the CPU .*, got one on meta"):
        attend(query, key, torch.empty(2, 5, 2, 16, device="meta"), **HEADS)
    with pytest.raises(KvkitError, match=r"^query: expected dtype"):
        attend(torch.zeros(2, 5, 4, 16, dtype=torch.float64), key, key, **HEADS)
    with pytest.raises(KvkitError, match=r"^key: expected shape"):
        attend(torch.from_numpy(query), key[:1], key, **HEADS)
    with pytest.raises(KvkitError, match=r"^query: expected a numpy array"):
        attend(query.tolist(), key, key, **HEADS)


def test_torch_is_not_imported():
    code = "import sys, kvkit, kvkit.interop; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.perf
def test_it_costs_nothing():
    """Beside a call of numpy's arrays: less than a microsecond."""

    def plain(query, key, *, heads=1):
        return query

    array = np.zeros(3)
    wrapped, times = returns_input_kind(plain), {}
    for call in (plain, wrapped):
        times[call] = min(timeit.repeat(lambda call=call: call(array, array, heads=2), number=2000, repeat=9))
    assert (times[wrapped] - times[plain]) / 2000 < 1e-6
