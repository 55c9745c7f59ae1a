"""What no operator takes, from the table of operators: each argument of each, with all that it may not be."""

import numpy as np
import pytest
from calls import CALLS, arrays_of, like, with_outputs
from refusals import NO_ARRAYS, Tensor, refused, swapped
from scenes import assert_same

import kvkit
from kvkit.errors import describe
from kvkit.operators import OPERATORS
from kvkit.tools.vectors.calls import LAYERS

every_call = pytest.mark.parametrize("call", [make() for make in CALLS.values()], ids=CALLS)
NOT_INTEGERS = [1.0, 8.0, np.float32(1), True, False, np.True_, "8", None, [1], 1 + 0j, np.array([8, 8])]
OF_KIND = {
    int: NOT_INTEGERS,
    float: [np.nan, np.inf, -np.inf, "1", True, [1.0], 1j, np.ones(2)],
    bool: [None, "yes", 2, -1, 1.0, [True], np.array([True, False])],
    str: [0, True, b"ND", "nd", "none", "fp16", ["ND"], np.float32],
    dict: [0, "half", [("rotary_dim", 8)], {"rotary_dim": 3}, {"rotary_dim": 34}, {"dims": 8}],
    tuple: [None, 3, "ab", (3,), (1, 2, 3), (1.0, 2), (None, 1), ("1", "2"), (-2, 0), (0, -5), np.ones(2)],
}
OUT_OF_RANGE = {
    "num_layer": [0, -3], "layer_idx": [LAYERS, -1, 2**70], "quant_bit": [2, -8],
    "quant_group": [0, -8, 7, 48], "num_repeat": [0, -1, 2**70], "cache_layout": [-1, 4],
    "cache_mode": [-1, 2], "page_size": [0, -3], "num_heads": [-4], "head_dim": [-8],
    "num_kv_heads": [3, 8, -2], "softcap": [None, -1.0, 1e-46], "rotary_dim": [-1, 3, 10],
    "max_position_embeddings": [0, -1], "theta": [None, 0.0, -1.0, 1e39],
    "scaling_factor": [None, 0.0, -1.0, 1e39], "scaling_type": ["yarn", b"linear"],
    "data_type": ["float64", "int8", "int4", "", 16], "cache_format": ["NHSD", ""],
    "quant_format": ["fp8", "", 8, True], "empty_window": ["COPY", ""],
    "layout": ["NHD", "b n h", "b n h c c", "b kv"], "compress_type": [-1, 4, "kvhead"],
    "state_layout": ["kv", "", "KVQ"], "rule": ["delta_gated", ""], "chunk": [0, -1, 257],
    "return_capsule": [1, -1, 2**70], "kind": ["", "GDN"], "activation": ["relu", "", "SiLU"],
    "norm_eps": [0.0, -1e-6], "lower_bound": [0.0, 5.0],
    "ratio": [0, -1, 2**70], "eps": [0.0, -1e-6],
    "value_dim": [0, -1, 577], "format": ["q8_0", "ds_mla:floor"],
}  # fmt: skip
# Numbers that are legal, but not with these arrays.
ELSEWHERE = {
    "num_layer": [(4, "cache")],
    "cache_layout": [(1, "cache")],
    "head_dim": [(12, ("head_dim", "query"))],
    "num_kv_heads": [(value, ("num_kv_heads", "key", "current_key")) for value in (1,)],
}
DTYPES = ("float64", "int16", "bool", "complex64", "object", "V1", "int8")
PMX_CACHES = ("cache", "scale")  # whose last axis is in one piece, and which no input may overlap
INDEX_DTYPES = ("float64", "bool", "uint64", "int16", "object", ">i8")


def attributes():
    for label, make in CALLS.items():
        call = make()
        for attribute in call.operator.attributes:
            if attribute.name != "quant_group" or call["quant_bit"]:  # floats have no groups
                yield pytest.param(make, attribute, id=f"{label}-{attribute.name}")


def inputs(dtypes):
    """Return the names of a call's inputs that have such dtypes."""
    for label, make in CALLS.items():
        call = make()
        for array in call.operator.inputs:
            if call.inputs.get(array.name) is not None and dtypes(array, call[array.name]):
                yield pytest.param(make, array, id=f"{label}-{array.name}")


def is_tensor(array, value):
    return "int64" not in array.dtypes


def is_index(array, value):
    return "int64" in array.dtypes and np.ndim(value) > 0


def is_number(array, value):
    return "int64" in array.dtypes and np.ndim(value) == 0


def test_calls_are_of_every_operator_and_legal():
    """Otherwise the others would prove nothing."""
    assert {make().name for make in CALLS.values()} == set(OPERATORS)
    for make in CALLS.values():
        make().run(kvkit)


# Attributes


@pytest.mark.parametrize(("make", "attribute"), [*attributes()])
def test_attributes(make, attribute):
    call, name = make(), attribute.name
    none = [] if attribute.default is None or name == "activation" else [None]
    for value in [*OF_KIND[attribute.kind], *none, *OUT_OF_RANGE.get(name, ())]:
        refused(call.but(**{name: value}), name)
    for value, names in ELSEWHERE.get(name, ()):
        if call.inputs.get(name) != value:
            refused(call.but(**{name: value}), names)


def test_every_attribute_has_a_limit():
    names = {a.name for op in OPERATORS.values() for a in op.attributes if a.kind in (int, str)}
    assert names <= set(OUT_OF_RANGE)


# Inputs


@pytest.mark.parametrize(("make", "array"), [*inputs(is_tensor)])
def test_tensors(make, array):
    call, name = make(), array.name
    tensor, any_type = call[name], "any" in array.dtypes  # which both arrays of a copy have
    about = ("source", "target") if any_type else name

    def wrong(value, names=about):
        refused(call.but(**{name: value}), names)

    for form in NO_ARRAYS.values():
        if form(tensor) is not None or not array.optional:
            wrong(form(tensor))
    for dtype in DTYPES:
        if dtype not in array.dtypes and not (any_type and tensor.dtype == dtype):
            wrong(np.zeros(tensor.shape, dtype))
    if tensor.dtype.itemsize > 1:
        wrong(swapped(tensor))
    ranks = (
        "attn_mask",
        "x",
        "outputs",
        "alibi_slopes",
        "latent",
        "q",
        "a",
    )  # arrays with other numbers of axes
    if name not in ranks and not copies(call) and (call.name, name) != ("mla_append", "cache"):
        wrong(tensor[None])
        wrong(tensor[0])
    wrong(np.array(0, tensor.dtype))
    if array.inout:
        fixed = tensor.copy()
        fixed.flags.writeable = False
        wrong(fixed)
        for axis in range(tensor.ndim):
            if tensor.shape[axis] > 1:
                same = np.broadcast_to(tensor.take([0], axis), tensor.shape)
                same.flags.writeable = True
                wrong(same)
    if name in PMX_CACHES and call.name != "mla_append":
        wrong(np.repeat(tensor, 2, -1)[..., ::2])
        wrong(tensor[..., ::-1])


# By call and array: axes whose size nothing else says.
FREE = {
    "static cache of floats": {"cache": (0, 3)}, "cache of floats": {"cache": (0,)},
    "static attention": {"value": (3,)}, "dynamic attention": {"value": (2,)},
    "static cache attention": {"cache": (0, 3)}, "dynamic cache attention": {"cache": (0,)},
    "merge": {"outputs": (3,)}, "static rotary": {"query": (2,), "key": (2,)},
    "rotary": {"query": (1,), "key": (1,)}, "contexts": {"key_cache": (2, 3), "value_cache": (2, 3)},
    "copies": {"key_cache": (1, 2, 3), "value_cache": (1, 2, 3)}, "paged attention": {"value_cache": (3,)},
    "paged attention per head": {"query": (0,), "value_cache": (3,)}, "pools": {"value_cache": (3,)},
    "swaps": {"source": (0,), "target": (0,)},
    **{f"latent rows{kind}": {"latent": (0, 1)} for kind in ("", " of bytes")},
    "latent rows in blocks of bytes": {"latent": (0, 1)},
    "chosen latent rows": {"latent": (0, 1), "indices": (1,)}, "latent append": {"cache": (0, 1)},
    "latent append of bytes": {"cache": (0, 1)}, "absorb": {"query": (0,), "w_uk": (2,)},
    "expand": {"latent_output": (0,), "w_uv": (1,)}, "indexer": {"keys": (0, 1)}, "choice": {"scores": (1,)},
    **{f"delta {kind}": {"state": (0,)} for kind in ("step", "step of channels", "rule")},
    "compression": {"state": (0, 1)}, "rotation back": {"output": (1, 2)},
    "replay": {"state": (0,), "capsule": (1,)},
    "convolution": {"state": (0,)}, "convolution of one token": {"state": (0,)},
    "matrices": {"x": (0, 1, 2)}, "matrices back": {"y": (0,)},
}  # fmt: skip
MIXED = (
    "pools",
    "latent rows",
    "chosen latent rows",
    "latent append of bytes",
    "indexer",
)  # calls of arrays of several types
# by itself
OF_ANY_FLOAT = (
    "scale",
    "sinks",
    "attn_mask",
    "alibi_slopes",
    "outputs",
    "x",
    "state",
    "a_log",
    "dt_bias",
    "ape",
    "norm_weight",
    "output",
)


@pytest.mark.parametrize("label", CALLS)
def test_arrays_that_do_not_fit_the_others(label):
    """Each axis of each tensor shorter, longer or empty; and tensors of another type."""
    call = CALLS[label]()
    names = (*(array.name for array in call.operator.inputs), "value")
    for array in call.operator.inputs:
        tensor = call.inputs.get(array.name)
        if tensor is None or not is_tensor(array, tensor):
            continue
        for axis in range(tensor.ndim) if array.name != "attn_mask" else ():
            if axis not in FREE.get(label, {}).get(array.name, ()):
                longer = np.concatenate([tensor, tensor.take([0], axis)], axis)
                for wrong in (np.delete(tensor, -1, axis), longer, np.delete(tensor, np.s_[:], axis)):
                    refused(call.but(**{array.name: np.ascontiguousarray(wrong)}), names)
        stores_any = array.name == "cache" and call.inputs.get("scale", 0) is None
        if (
            not copies(call)
            and not label.startswith(MIXED)
            and array.name not in OF_ANY_FLOAT
            and not stores_any
        ):
            for dtype in {"float32", "float16", "bfloat16", "int8", "uint8"} - {tensor.dtype.name}:
                refused(call.but(**{array.name: np.zeros(tensor.shape, dtype)}), names)


def copies(call):
    return call.name in ("ascend.block_copy", "swap_blocks")


@pytest.mark.parametrize(("make", "array"), [*inputs(is_index)])
def test_index_tensors(make, array):
    call, name = make(), array.name
    tensor = call[name]
    others = tuple(other.name for other in call.operator.inputs if "int64" in other.dtypes)
    wrong = [NO_ARRAYS[form](tensor) for form in ("number", "other_library", "bytes", "masked")]
    wrong += [np.clip(tensor, 0, 100).astype(dtype) for dtype in INDEX_DTYPES]
    wrong += [tensor[None], tensor[0], "0123", [[1], [2, 3]], *([] if array.optional else [None])]
    for value in wrong:
        refused(call.but(**{name: value}), name)
    fewer = (tensor[:-1], tensor[:0]) if name != "pairs" else ()
    longer = np.concatenate([tensor, tensor[-1:]])
    free = call.name == "compressed_slots" and name == "block_tables"  # of sequences without tokens
    for value in (*fewer, *(() if free else (longer,))):
        refused(call.but(**{name: value}), others)


@pytest.mark.parametrize(("make", "array"), [*inputs(is_number)])
def test_numbers(make, array):
    call, name = make(), array.name
    for value in (*NOT_INTEGERS, -1, -(2**70), np.array([1.5]), Tensor(np.array(1))):
        if value is not None or not array.optional:
            refused(call.but(**{name: value}), name)


# Outputs


def each(array):
    """Yield arrays that are illegal for a result."""
    yield from (7, "x", array.tolist(), array[None].copy(), array[..., :-1])
    yield from (np.zeros(array.shape, dtype) for dtype in ("c8", "f8", "f2") if array.dtype != dtype)
    yield from (swapped(array), np.zeros((array.shape[0] + 1, *array.shape[1:]), array.dtype))
    fixed = array.copy()
    fixed.flags.writeable = False
    yield fixed
    yield np.broadcast_to(array.ravel()[:1], array.shape)


def wrongs(call, results):
    """Yield illegal values of `out`."""
    there = arrays_of(results)
    for i, result in enumerate(there):
        for wrong in each(result):
            yield like(results, [*there[:i], wrong, *there[i + 1 :]])
        if "ascend" not in call.name or "query" in call.inputs:  # others take any strides
            wrong = np.repeat(result, 2, axis=-1)[..., ::2]
            yield like(results, [*there[:i], wrong, *there[i + 1 :]])
    if isinstance(results, np.ndarray):
        yield from ((results,), [results, results], ())
    else:
        yield from (7, "x", there[0], (), there[:-1], {"out": there[0]})
        if call.name != "ascend.paged_cache_load":
            yield from ((*there, None), [*there, there[0]])
        yield from ([there[0]] * len(there), [None, *there[1:]])
        if there[0].shape != there[1].shape:
            yield there[::-1]
        memory = np.zeros(there[0].nbytes + there[1].nbytes, np.uint8)
        yield [placed(memory, there[0]), placed(memory, there[1], there[0].nbytes - there[1].itemsize)]


def placed(memory, array, begin=0):
    """Return an array of this shape in a part of memory."""
    return memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)


@with_outputs
def test_outputs(make, more):
    """Each array of each operator is refused in the same words."""
    call = make()
    results = call.copy().run(kvkit, **more)
    said = {refused(call, "out", out=out, **more) for out in wrongs(call, results)}
    labels, arrays = ["out"], arrays_of(results)
    if isinstance(results, tuple):
        names = OPERATORS[call.name].returned({"return_lse": "return_lse" in more})
        labels = [f"out ({name})" for name in names]
        fewer, more_of = len(names) - 1, len(names) + 1
        counts = {"int 7", "str 'x'", describe(arrays[0]), "tuple ()", f"list of {fewer} elements"}
        counts |= {"dict of 1 elements"}
        if call.name != "ascend.paged_cache_load":  # whose second output may be missing
            counts |= {f"tuple of {more_of} elements", f"list of {more_of} elements"}
        wanted = f"out: expected a tuple of {len(names)} arrays ({', '.join(names)}), got "
        assert {words.removeprefix(wanted) for words in said if words.startswith("out: ")} == counts
        assert f"{labels[0]}: expected memory apart from {labels[1]}, got arrays that overlap" in said
    for label, array in zip(labels, arrays, strict=True):
        longer = array.shape[0] + 1, *array.shape[1:]
        for words in (
            "a numpy array, got str 'x'", f"dtype {array.dtype}, got complex64",
            f"{array.ndim} axes, got shape {(1, *array.shape)}", f"shape {array.shape}, got {longer}",
            "a writeable array, got a read-only one",
        ):  # fmt: skip
            assert f"{label}: expected {words}" in said


@pytest.mark.cpu
@with_outputs
def test_outputs_that_are_right_are_used(make, more, poison):
    expected = make().run(**more)
    given = like(expected, [poison.like(array) for array in arrays_of(expected)])
    results = make().run(out=given, **more)
    for got, out, right in zip(*map(arrays_of, (results, given, expected)), strict=True):
        assert got is out
        assert_same(got, right)


@pytest.mark.cpu
def test_keys_alone_are_one_of_two_outputs():
    call = CALLS["contexts"]().but(value_cache=None)
    expected, nothing = call.run(kvkit)
    given = np.empty_like(expected)
    key, value = call.run(kvkit, out=(given, None))
    assert key is given
    assert nothing is value is None
    assert key.tobytes() == expected.tobytes()
    with pytest.raises(kvkit.KvkitError, match=r"^out \(key\): expected dtype float16, got float32$"):
        call.run(kvkit, out=(given.astype(np.float32),))
    with pytest.raises(kvkit.KvkitError, match=r"^out: expected a tuple of 1 arrays \(key\), got an array"):
        call.run(kvkit, out=given)


@pytest.mark.cpu
def test_an_output_may_be_its_own_input_where_that_is_said():
    call = CALLS["rotary"]()
    expected, given = call.copy().run(kvkit), (call["query"], call["key"])
    got = call.run(kvkit, out=given)
    assert [array is one for array, one in zip(got, given, strict=True)] == [True, True]
    assert [array.tobytes() for array in got] == [array.tobytes() for array in expected]


@with_outputs
def test_outputs_over_inputs(make, more):
    """With an element of it in common."""
    call = make()
    results = call.copy().run(kvkit, **more)
    there = arrays_of(results)
    for array in call.operator.inputs:
        given = call.inputs.get(array.name)
        if given is None or not is_tensor(array, given):
            continue
        for i, result in enumerate(there):
            memory = np.zeros(given.nbytes + result.nbytes, np.uint8)
            inside = placed(memory, given)
            inside[...] = given
            out = placed(memory, result, (given.nbytes - 1) // result.itemsize * result.itemsize)
            outs = like(results, [*there[:i], out, *there[i + 1 :]])
            message = refused(call.but(**{array.name: inside}), ("out", "cache", "scale"), out=outs, **more)
            assert message.endswith("got arrays that overlap")
            assert f"apart from {array.name}" in message or message.startswith(array.name)


@every_call
def test_what_changes_lies_apart(call):
    """A store would change what is still to be read."""
    for array in call.operator.inputs:
        if array.name not in PMX_CACHES or call.inputs.get(array.name) is None:
            continue
        changing = call[array.name]
        for other in call.operator.inputs:
            given = call.inputs.get(other.name)
            if other is array or given is None or not is_tensor(other, given):
                continue
            memory = np.zeros(changing.nbytes + given.nbytes, np.uint8)
            inside = placed(memory, changing)
            inside[...] = changing
            overlap = placed(memory, given, (changing.nbytes - 1) // given.itemsize * given.itemsize)
            refused(call.but(**{array.name: inside, other.name: overlap}), (array.name, other.name))
