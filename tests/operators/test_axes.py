"""Arrays with two axes exchanged: an operator or a layer refuses them and says which order it expects."""

import inspect
import itertools
import re

import calls
import kind_scenes
import numpy as np
import pytest
from kind_scenes import KINDS, tokens

import kvkit
from kvkit import KvkitError
from kvkit.cache import CompressedLayer, GatedDeltaLayer, StateLayer
from kvkit.calls.targets import definition
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


@pytest.mark.parametrize("kind", KINDS)
def test_layers_name_the_order_of_axes_they_expect(kind):
    cache = KINDS[kind]()
    kind_scenes.append(cache, 3, 0)
    layer = cache.layers[-1]
    if isinstance(layer, (StateLayer, GatedDeltaLayer, CompressedLayer)):
        pytest.skip("takes other arrays, see below")
    heads, latent = 1 if layer.latent_dim else kind_scenes.HEADS, layer.latent_dim
    sizes = (latent, layer.rope_dim) if latent else (16, 16)
    batch = layer.batch_size
    parts = [tokens(5, i, heads, dim, batch) for i, dim in enumerate(sizes)]
    query = tokens(1, 7, 2 * heads, sum(sizes) if latent else 16, batch)
    more = {"softmax_scale": 0.1} if latent else {}
    before = cache.get_seq_length(0)
    taken = [(parts, i, cache.layers[0].update) for i in range(2)] + [([query], 0, layer.attend)]
    for arrays, i, call in taken:
        for axes in pairs(arrays[i]):
            if latent and call == layer.attend and axes == (1, 2):
                continue  # any number of heads reads latent rows
            given = [*arrays]
            given[i] = exchanged(given[i], *axes)
            options = more if call == layer.attend else {}
            try:
                call(*given, **options)
            except KvkitError as error:
                text = str(error)
            else:
                raise AssertionError((call, i, axes, [x.shape for x in given]))
            hint = r"look like \[|than \[batch, heads, tokens, dim\]|expected.* \[|shape \["
            assert re.search(hint, text), (i, axes, text)
            if axes == (1, 2) and call != layer.attend:
                assert "[batch, heads, tokens, dim]" in text, text
    assert cache.get_seq_length(0) == before
