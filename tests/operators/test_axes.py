"""Arrays with two axes exchanged: an operator or a layer refuses them and says which order it expects."""

import inspect
import itertools

import calls
import kind_scenes
import numpy as np
import pytest
from kind_scenes import KINDS, tokens

import kvkit
from kvkit import KvkitError
from kvkit.cache import CompressedLayer, GatedDeltaLayer, IndexedLayer, StateLayer
from kvkit.calls.targets import Checks, definition
from kvkit.operators import OPERATORS
from kvkit.runtime.call_log import operator_path

# What no operator can tell: any size would be right. (operator, argument, axes)
FREE = {
    ("ascend.paged_cache_load", "key_cache", (2, 3)), ("ascend.paged_cache_load", "value_cache", (2, 3)),
    *(
        ("ascend.block_copy", name, axes)
        for name in ("key_cache", "value_cache") for axes in ((1, 2), (1, 3), (2, 3))
    ),
    ("compress_tokens", "state", (0, 1)), ("gated_delta_replay", "state", (1, 3)),
    *(("ascend.nd_to_nz", "x", axes) for axes in ((0, 1), (0, 2), (1, 2))),
}  # fmt: skip
# What is refused because too little room is left, so that the order is not the likeliest fault
NO_ROOM = {
    ("key_value_cache", "cache", (0, 3)), ("multi_head_cache_attention", "cache", (0, 3)),
    ("gated_delta_replay", "state", (0, 3)),
}  # fmt: skip


def exchanged(array, i, j):
    return np.ascontiguousarray(array.swapaxes(i, j))


def pairs(array):
    """Return pairs of axes of different sizes; equal ones cannot be told."""
    every = itertools.combinations(range(array.ndim), 2)
    return [(i, j) for i, j in every if array.shape[i] != array.shape[j]]


@pytest.mark.parametrize("make", calls.CALLS.values(), ids=calls.CALLS)
def test_operators_name_the_order_of_axes_they_expect(make):
    call = make()
    for each in call.operator.inputs:
        array = call.inputs.get(each.name)
        if not isinstance(array, np.ndarray) or array.ndim < 2:
            continue
        for axes in pairs(array):
            where = call.name, each.name, axes
            turned = call.copy().but(**{each.name: exchanged(array, *axes)})
            try:
                turned.run(kvkit)
            except KvkitError as error:
                text = str(error)
            else:
                assert where in FREE, where
                continue
            hint = "looks like ["
            assert hint in text or where in NO_ROOM, (where, text)
            if hint in text:
                i, j = axes
                assert f"swapaxes({i}, {j})" in text or f"{each.name} looks" not in text, (where, text)


def test_all_arrays_as_caches_take_them():
    query, keys = np.ones((2, 6, 5, 16), np.float32), np.ones((2, 3, 11, 16), np.float32)
    looks, wanted = (rf"\[B, {axes}, head_dim\]" for axes in ("num_heads, S", "S, num_heads"))
    text = rf"query and key and value look like {looks}, which caches take, expected is {wanted}: swapaxes"
    with pytest.raises(KvkitError, match=text):
        kvkit.multi_head_attention(query, keys, keys, num_heads=6, num_kv_heads=3, head_dim=16)


def test_pools_of_another_layout_are_told_by_its_letters():
    call = calls.CALLS["pools"]().copy()
    pools = {name: exchanged(call[name], 1, 2) for name in ("key_cache", "value_cache")}
    call.but(**pools, layout="b h n c").run()
    with pytest.raises(KvkitError, match=r"key_cache looks like \[b, n, h, c\], expected is \[b, h, n, c\]"):
        call.but(**pools | {"key_cache": call["key_cache"]}, layout="b h n c").run()


def test_a_full_cache_is_not_said_to_be_in_another_order():
    call = calls.CALLS["static cache of floats"]().copy()
    with pytest.raises(KvkitError, match="room") as caught:
        call.but(start_pos=call["cache"].shape[3] - 1).run()
    assert "look" not in str(caught.value)


@pytest.mark.parametrize("name", OPERATORS)
def test_paths_of_operators_are_those_of_the_table(name):
    assert operator_path(OPERATORS[name].function()) == name
    assert "on" in inspect.signature(definition(OPERATORS[name].function())).parameters


def layer_calls(kind):
    """Yield the calls of a layer that take arrays: (name, arrays by name, function of these arrays)."""
    cache = KINDS[kind]()
    kind_scenes.append(cache, 3, 0)
    layer, last = cache.layers[-1], len(cache) - 1
    batch, rng = layer.batch_size, np.random.default_rng(0)

    def random(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    if isinstance(layer, GatedDeltaLayer):
        inner = (2, 4) if layer.kind == "kda" else (2,)
        arrays = {"qkv": random(batch, 5, 14), "a": random(batch, 5, *inner), "b": random(batch, 5, 2)}
        arrays |= {"weight": random(14, 3), "a_log": random(2), "dt_bias": random(*inner)}
        yield "step", arrays, lambda **given: layer.step(*[*given.values()][:4], gates=[*given.values()][4:])
    elif isinstance(layer, StateLayer):
        yield "update", {"sum": tokens(3, batch=batch)}, lambda sum: cache.update({"sum": sum}, 5, 0)
    elif isinstance(layer, CompressedLayer):
        (row, pair), more = kind_scenes.projected(layer, 5, 0, batch)
        arrays = dict(
            zip(("row", "kv", "gate", "index_kv", "index_gate"), (row, *pair, *more["indexer"]), strict=True)
        )
        yield (
            "update", arrays,
            lambda row, kv, gate, index_kv, index_gate: cache.update(
                row, (kv, gate), 0, indexer=(index_kv, index_gate)
            ),
        )  # fmt: skip
        arrays = {"query": tokens(1, 2, 9, layer.dim, batch), "queries": random(batch, 1, 3, 4)}
        yield (
            "attend", arrays | {"weights": random(batch, 1, 3)},
            lambda query, queries, weights: cache.attend(query, last, index=(queries, weights)),
        )  # fmt: skip
    else:
        latent = layer.latent_dim
        heads, sizes = (1, (latent, layer.rope_dim)) if latent else (kind_scenes.HEADS, (16, 16))
        parts = {
            name: tokens(5, i, heads, dim, batch)
            for i, (name, dim) in enumerate(zip("kv", sizes, strict=True))
        }
        yield "update", parts, lambda k, v: cache.update(k, v, 0)
        if isinstance(layer, IndexedLayer):
            yield "update_index", {"index_keys": random(batch, 5, 4)}, layer.update_index
        options = {"softmax_scale": 0.1} if latent else {}
        query = tokens(1, 7, 1 if latent else 2 * heads, sum(sizes) if latent else 16, batch)
        yield "attend", {"query": query}, lambda query: cache.attend(query, last, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_name_the_order_of_axes_they_expect(kind):
    for call, arrays, run in layer_calls(kind):
        for name, array in arrays.items():
            for axes in pairs(array):
                with pytest.raises(KvkitError) as caught:
                    run(**arrays | {name: exchanged(array, *axes)})
                text = str(caught.value)
                assert f"swapaxes{axes} exchanges the two" in text, (call, name, axes, text)
        run(**arrays)  # an error has changed nothing


# {an operator: the method of a plan, and what the plan itself takes}
PLANS = {
    "dynamic_batching.key_value_cache": kvkit.dynamic_batching.plan,
    "dynamic_batching.multi_head_cache_attention": kvkit.dynamic_batching.plan,
    "paged_attention": kvkit.paged_plan, "paged_append": kvkit.paged_plan,
}  # fmt: skip


@pytest.mark.parametrize("scene", [name for name, make in calls.CALLS.items() if make().name in PLANS])
def test_methods_of_plans_say_what_their_operators_say(scene):
    call = calls.CALLS[scene]()
    given = {name: value for name, value in call.inputs.items() if value is not None}
    if call.name == "paged_append":  # a plan has tables in place of slots
        given |= {"block_tables": np.array([[0, 1]]), "context_lens": np.array([7])}
        given["query_starts"] = np.array([0, len(call["key"])])
        given = {name: value for name, value in given.items() if name not in ("slot_mapping", "positions")}
    taken = inspect.signature(PLANS[call.name]).parameters.keys() & given.keys()
    size = {"page_size": call["key_cache"].shape[1]} if "paged" in call.name else {}
    plan = PLANS[call.name](**{name: given.pop(name) for name in taken}, **size)
    method, seen = getattr(plan, call.name.rpartition(".")[2]), 0
    method(**given)
    for each in call.operator.inputs:
        array = given.get(each.name)
        if not isinstance(array, np.ndarray) or array.ndim < 2:
            continue
        for axes in pairs(array):
            with pytest.raises(KvkitError) as caught:
                method(**given | {each.name: exchanged(array, *axes)})
            assert "looks like [" in str(caught.value), (each.name, axes, str(caught.value))
            seen += 1
    assert seen > 5


def test_an_error_of_another_kind_in_the_checks_does_not_hide_the_first(monkeypatch):
    def fails(self, function, values):
        raise RuntimeError("of the checks")

    monkeypatch.setattr(Checks, "call", fails)
    query = np.ones((1, 8, 7, 64), np.float32)
    with pytest.raises(KvkitError, match="key"):
        kvkit.multi_head_attention(query, query[:, :3], query[:, :2])
