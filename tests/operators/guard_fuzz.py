"""Calls whose arrays end or begin where memory does: `python guard_fuzz.py COUNT SEED [FIRST]`.

Every array, outputs too, lies right before or right behind a page that nobody may touch, so that a kernel
which reads or writes a byte outside ends the process. Results and all that was written have the bits of the
same call on ordinary memory. Half of the calls have a number changed or an array cut, by one mostly: they are
refused in the same words, or have the same bits. The last line is what was called and what came of it; where
the process ends before, it is the number of the call. `PYTHONPATH` has the rooms of the tests.
"""

import collections
import functools
import itertools
import json
import sys
import warnings

import attention_scenes as attention
import numpy as np
import scenes
from ascend_attention_scenes import EXTRAS, call_of
from ascend_block_scenes import NO_BLOCK, caches_of
from ascend_scenes import compressed_call, plain_call
from borders import BEGIN, END, at_border
from plan_scenes import append, planned
from plan_scenes import attend as attend_by
from pool_calls import EXTRAS as OPTIONS
from pool_calls import Scene, any_bits, mask_of, scene
from position_scenes import random_mask
from scenes import DTYPES, FLOATS, INT64_MAX, INT64_MIN, LAYER, Formats

import kvkit
from kvkit import KvkitError
from kvkit.cpu.copy import pieces, transfer
from kvkit.cpu.positions import alibi, rotary
from kvkit.reference.ascend import KVHEAD, OMNI, ROPE

DIMS = (1, 6, 8, 17, 24, 40, 64, 128)
INT8, INT4 = Formats("fp16", "int8", "fp16", 8, 8), Formats("fp32", "int8", "bf16", 4, 32)
MOVED = [Formats("fp32", "fp32"), Formats("fp16", "fp16"), Formats("bf16", "fp32"), Formats("int8", "int8")]
ATTENDED = [*attention.PLAIN.values(), Formats("fp32", "fp16"), INT8, INT4]
ELEMENTS = [*map(DTYPES.get, FLOATS), DTYPES["int8"]]
NEAR = (-2, -1, 1, 1, 2)
# What says where something lies, and the arrays where it does.
PLACES = {
    *("start_pos", "seqstarts", "kvstarts", "cachestarts", "decoding_batches", "cache", "scale", "m", "n"),
    *("slot_mapping", "wins", "offset_index", "seq_lens", "block_tables", "context_lens", "seq_starts"),
    *("src", "dst", "cum_sum", "key_cache", "value_cache", "pad_len", "query_starts", "pairs", "cos", "sin"),
}
THRESHOLDS = [
    *((module, "SMALL_BYTES") for module in (transfer, alibi, pieces, rotary)),
    *((module, "STREAM_BYTES") for module in (transfer, pieces, rotary)),
]


# Legal calls: (function, arguments by name)


def one(rng, choices):
    return choices[rng.integers(len(choices))]


def dim_of(rng, formats):
    return int(one(rng, {8: (8, 24, 40, 128), 32: (32, 64, 96)}[formats.group] if formats.bit else DIMS))


def lengths_of(rng):
    """(past, new) of some sequences: none, short and long ones."""
    past, new = (0, 0, 1, 3, 7, 16, 40, 300), (0, 1, 1, 1, 2, 5, 33)
    return [(int(one(rng, past)), int(one(rng, new))) for _ in range(rng.integers(0, 6))]


def tight(rng, call, **ends):
    """The call with nothing in its cache behind its layer, its last row and sequence; half of them."""
    if "cache" in call.inputs and rng.random() < 0.5:
        axes = (scenes.STATIC_AXES, scenes.DYNAMIC_AXES)[call.kind.startswith("dynamic")]
        ends |= {"layer": LAYER + 1}
        parts = tuple(slice(ends.get(axis)) for axis in axes[call.attrs["cache_layout"]].split())
        for name in ("cache", "scale"):
            if call[name] is not None:
                call.inputs[name] = call[name][parts].copy()
        call.attrs["num_layer"] = LAYER + 1
    return call


def key_value_cache(rng):
    formats, heads, repeat = one(rng, [*MOVED, INT8, INT4]), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    more = {"heads": heads, "repeat": repeat, "dim": dim_of(rng, formats)}
    if rng.random() < 0.5:
        batch, start, seqlen = (int(rng.integers(0, end)) for end in (4, 40, 9))
        scene = scenes.static(rng, formats, int(rng.integers(2)), batch, start, seqlen, **more)
        scene = tight(rng, scene, sequence=batch, row=start + seqlen)
        return kvkit.key_value_cache, scene.inputs | scene.attrs
    page_size, mode = int(one(rng, (1, 3, 16, 128))), int(rng.integers(2))
    lengths = None if rng.random() < 0.2 and page_size < 20 else lengths_of(rng)
    scene = tight(rng, scenes.dynamic(rng, formats, int(rng.integers(4)), mode, lengths, page_size, **more))
    return kvkit.dynamic_batching.key_value_cache, scene.inputs | scene.attrs


def attention_call(rng, kind, formats=None):
    formats = formats or one(rng, ATTENDED if "cache" in kind else list(attention.PLAIN.values()))
    kv_heads, options = int(rng.integers(1, 4)), {}
    heads = kv_heads * int(one(rng, (1, 1, 2, 3, 8, 16)))
    options |= {"is_causal": bool(rng.random() < 0.7), "is_alibi": bool(rng.random() < 0.3)}
    if rng.random() < 0.3:
        options["window"] = tuple(int(n) for n in rng.choice([-1, 0, 1, 5, 20], 2))
    if rng.random() < 0.3:
        options["softcap"] = 3.0
    if rng.random() < 0.3:
        options["sinks"] = rng.uniform(-2, 4, heads).astype(np.float32)
    more = {"heads": heads, "kv_heads": kv_heads, "dim": dim_of(rng, formats), **options}
    if "cache" in kind:
        more["layout"] = int(rng.integers(2 if kind.startswith("static") else 4))
    elif rng.random() < 0.5:
        more["value_dim"] = int(one(rng, DIMS))
    if kind.startswith("static"):
        batch, past, seqlen = int(rng.integers(1, 4)), *((*lengths_of(rng), (5, 1))[0])
        call = getattr(attention, kind)(rng, formats, past, seqlen, batch, **more)
        call = tight(rng, call, sequence=batch, row=past + seqlen)
    else:
        if kind == "dynamic_cache":
            more |= {"mode": int(rng.integers(2)), "page_size": int(one(rng, (1, 3, 16, 128)))}
        lengths = sorted(lengths_of(rng), key=lambda pair: pair[1] != 1)
        more["decoding"] = sum(new == 1 for _, new in lengths) if rng.random() < 0.7 else 0
        call = tight(rng, getattr(attention, kind)(rng, formats, lengths, **more))
    if rng.random() < 0.4 and call["query"].size:
        pad, dtype = int(rng.integers(0, 4)), one(rng, (None, bool, np.float32))
        lead = one(rng, (None, 1, heads))
        if kind.startswith("static"):
            shape = (() if lead is None else (lead,)) + (call["query"].shape[1],)
            call.inputs["attn_mask"] = attention.static_mask(rng, call, shape, dtype, pad)
        else:
            call.inputs["attn_mask"] = attention.dynamic_mask(rng, call, lead, dtype, pad)
    return call


def attend(rng):
    kind = one(rng, attention.KINDS)
    call = attention_call(rng, kind)
    function = functools.reduce(getattr, attention.OPERATORS[kind][0].split("."), kvkit)
    return function, call.inputs | call.attrs | {"return_lse": bool(rng.random() < 0.5)}


def by_plan(**arguments):
    """A plan's two operators, each for two layers: the second call repeats the first at other addresses."""
    calls = [attention.Call("dynamic_cache", *pair) for pair in arguments["calls"]]
    step = planned(calls[0])
    return [method(step, call) for method in (append, attend_by) for call in calls]


def plan(rng):
    call = attention_call(rng, "dynamic_cache")
    second = call.copy()
    for name in ("query", "current_key", "current_value"):
        second.inputs[name] = attention.normal(rng, call[name].shape, call[name].dtype)
    return by_plan, {"calls": [[one.inputs, one.attrs] for one in (call, second)]}


def merge(rng):
    dtype, count = DTYPES[one(rng, FLOATS)], int(rng.integers(1, 5))
    shape = (int(rng.integers(0, 6)), int(rng.integers(1, 5)), int(one(rng, DIMS)))
    outputs = [attention.normal(rng, shape, dtype) for _ in range(count)]
    lses = [rng.choice([-np.inf, np.inf, 0.5, 3, -20], shape[:-1]).astype(np.float32) for _ in range(count)]
    if rng.random() < 0.5:
        outputs, lses = np.stack(outputs), np.stack(lses)
    return kvkit.merge_attention_states, {"outputs": outputs, "lses": lses}


def positions(rng):
    packed = kvkit.dynamic_batching
    dtype, heads = DTYPES[one(rng, FLOATS)], int(rng.integers(1, 5))
    lengths = lengths_of(rng)
    past, new = np.array(lengths, np.int64).reshape(-1, 2).T.copy()
    seqstarts, kvstarts = (np.r_[0, np.cumsum(x)].astype(np.int64) for x in (new, past + new))
    operator = rng.integers(6)
    if operator < 2:
        dim = int(one(rng, (2, 6, 8, 16, 40, 64, 128)))
        attrs = {"rotary_dim": int(one(rng, (0, 0, 2, dim))), "bypass_key": bool(rng.random() < 0.2)}
        attrs["interleaved"] = bool(rng.random() < 0.5)
        if rng.random() < 0.3:
            pairs = (attrs["rotary_dim"] or dim) // 2
            end = int(max(*(past + new), 12)) if operator and len(past) else 12
            attrs |= {name: rng.standard_normal((end, pairs), np.float32) for name in ("cos", "sin")}
        if rng.random() < 0.3:
            attrs |= {"scaling_type": one(rng, ("linear", "dynamic")), "scaling_factor": 2.5}
            attrs["max_position_embeddings"] = 10
        shape = (int(seqstarts[-1]),) if operator else (int(rng.integers(1, 4)), int(rng.integers(0, 7)))
        data = {name: attention.normal(rng, (*shape, heads, dim), dtype) for name in ("query", "key")}
        if operator:
            steps = {"seqstarts": seqstarts, "start_pos": past, "max_seqlen": None}
            return packed.rotary_position_embedding, data | steps | attrs
        padded = rng.integers(0, 4, shape[0]) if rng.random() < 0.5 else None
        return kvkit.rotary_position_embedding, data | {"start_pos": 5, "pad_len": padded} | attrs
    if operator == 2:
        tokens = np.zeros(seqstarts[-1], np.int64)
        return packed.position_index, {"sequences": tokens, "seqstarts": seqstarts, "start_pos": past}
    if operator == 3:
        return kvkit.alibi_slope, {"num_heads": int(rng.integers(1, 70))}
    more = {"num_heads": heads, "data_type": dtype.name, "attn_mask": None}
    mask_type = one(rng, (*map(DTYPES.get, FLOATS), bool))
    if operator == 4:
        n, m = int(rng.integers(0, 9)), int(one(rng, (0, 1, 16, 17, 65)))
        if rng.random() < 0.6 and n and m:
            more["attn_mask"] = random_mask(rng, (heads, n, m + int(rng.integers(3))), mask_type)
        return kvkit.alibi_mask, {"seqlen_q": n, "seqlen_kv": m, **more}
    if rng.random() < 0.6 and seqstarts[-1]:
        shape = (heads, seqstarts[-1], kvstarts[-1] + int(rng.integers(3)))
        more["attn_mask"] = random_mask(rng, shape, mask_type)
    return packed.alibi_mask, {"seqstarts": seqstarts, "kvstarts": kvstarts, **more}


def reshape(rng):
    mode, dtype = one(rng, (0, 0, KVHEAD, OMNI, ROPE)), one(rng, ELEMENTS)
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
    if mode:
        arrays, more = compressed_call(rng, dtype if mode != ROPE else ELEMENTS[rng.integers(3)], mode)
        return kvkit.ascend.reshape_and_cache, dict(zip(names, arrays, strict=True)) | more
    form = one(rng, ("ND", "NZ"))
    arrays = plain_call(rng, [dtype] * int(rng.integers(1, 3)), form)
    return kvkit.ascend.reshape_and_cache, dict(zip(names, arrays, strict=True)) | {"cache_format": form}


def blocks(rng):
    dtype, form, count = one(rng, ELEMENTS), one(rng, ("ND", "NZ")), int(rng.integers(1, 3))
    total, rows, batch = int(rng.integers(1, 6)), int(one(rng, (1, 2, 3, 16, 37))), int(rng.integers(0, 4))
    key_cache, value_cache = [*caches_of(rng, [dtype] * count, form, total, rows), None][:2]
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    if rng.random() < 0.3:
        ids = rng.permutation(total)
        cut, end = np.sort(rng.integers(0, total + 1, 2))
        ends = np.sort(rng.integers(0, end - cut + 1, cut))
        ends[-1:] = end - cut
        index = {"src": ids[:cut], "dst": ids[cut:end] if cut else ids[:0], "cum_sum": ends}
        return kvkit.ascend.block_copy, caches | index
    table = rng.integers(0, total, (batch, int(rng.integers(0, 5))))
    gone = rng.random(table.shape) < 0.2
    table[gone] = rng.choice(NO_BLOCK, gone.sum())
    index = {"block_tables": table, "seq_lens": rng.integers(0, 3 * rows + 1, batch), "cache_format": form}
    index["seq_starts"] = rng.integers(0, 3 * rows, batch) if rng.random() < 0.5 else None
    return kvkit.ascend.paged_cache_load, caches | index


def matrices(rng):
    dtype, (batch, m, n) = one(rng, ELEMENTS), (int(rng.integers(1, high)) for high in (4, 40, 70))
    x = attention.normal(rng, (batch, m, n), np.float32).astype(dtype)
    if rng.random() < 0.5:
        return kvkit.ascend.nd_to_nz, {"x": x}
    return kvkit.ascend.nz_to_nd, {"y": kvkit.ascend.nd_to_nz(x), "m": m, "n": n}


def paged(rng):
    more = {key: value for extra in EXTRAS.values() if rng.random() < 0.15 for key, value in extra.items()}
    lengths = rng.choice([0, 1, 5, 30, 70, 400], int(rng.integers(1, 4)))
    call = call_of(
        rng, one(rng, ("float32", "float16", "bfloat16")), bool(rng.random() < 0.4), lengths,
        int(rng.integers(1, 4)), int(one(rng, (1, 2, 3, 9))), int(one(rng, DIMS)), int(one(rng, DIMS)),
        int(one(rng, (1, 3, 16, 33))), **more,
    )  # fmt: skip
    return kvkit.ascend.paged_attention, call | {"return_lse": bool(rng.random() < 0.5)}


WHOLE = ("flash-attn", "separate HND", "FlashInfer", "FlashInfer HND", "vLLM LBNHC")


def pools(rng):
    """Attention over pools, which are whole arrays, appends to them and copies of their blocks."""
    engine, rows, heads = one(rng, WHOLE), int(one(rng, (1, 3, 16))), int(rng.integers(1, 4))
    dim, value_dim = (int(one(rng, DIMS)) for _ in range(2))
    if engine not in WHOLE[:2]:
        value_dim = dim
    kind = rng.random()
    if kind < 0.15:
        shape = (int(rng.integers(1, 5)), int(one(rng, DIMS)))
        pairs = np.array([[rng.integers(6), rng.integers(shape[0])]])
        source, target = any_bits(rng, (6, shape[1]), np.int8), any_bits(rng, shape, np.int8)
        return kvkit.swap_blocks, {"source": source, "target": target, "pairs": pairs}
    if kind < 0.4:
        dtype = one(rng, ("fp32", "fp16", "int8"))
        made, new, slots = scene(rng, engine, dtype, 6, 6, rows, heads, dim, value_dim)
        new = {"key": new[0], "value": new[1], "slot_mapping": slots}
        return kvkit.paged_append, new | whole(made)
    lengths, queries = rng.choice([0, 1, 5, 70, 600], (2, int(rng.integers(1, 4)))) // [[1], [20]]
    extras = [OPTIONS[name] for name in ("left", "both sides", "softcap", "not causal") if rng.random() < 0.2]
    made = Scene(
        rng, engine, one(rng, FLOATS), lengths, queries, heads, int(one(rng, (1, 2, 9))), dim, value_dim, rows
    )  # fmt: skip
    call = made.arguments | whole(made.pools) | {"return_lse": bool(rng.random() < 0.5)}
    for extra in extras:
        call |= extra
    if rng.random() < 0.3:
        call["attn_mask"] = mask_of(rng, made, one(rng, (bool, np.float32)))
    if rng.random() < 0.3:
        call["alibi_slopes"] = np.ones(made.query.shape[1], np.float32)
    return kvkit.paged_attention, call


def whole(made):
    """The pools of a call: where one holds both, it alone."""
    key, value = made.given
    return {"key_cache": key, "value_cache": None if value is key else value, "layout": made.layout}


def tables_of(function, seq_lens, **more):
    made = function(seq_lens, **more)
    if function is kvkit.ascend.razor_windows:
        return made
    names = ("context_lens", "block_tables", "slot_mapping", "mean_slots", "mean_counts")
    return [getattr(made, name) for name in names]


def tables(rng):
    heads, lengths = int(rng.integers(1, 4)), rng.integers(1, 30, int(rng.integers(0, 6)))
    more = {"block_size": int(rng.integers(1, 9)), "headroom": int(rng.integers(0, 5))}
    operator = rng.integers(3)
    if operator == 0:
        return functools.partial(tables_of, kvkit.ascend.slots), {"seq_lens": lengths, **more}
    if operator == 1:
        more = {"retrieval_heads": [0], "sinks": 2, "recent": 5, "fraction": 3}
        return functools.partial(tables_of, kvkit.ascend.razor_windows), {
            "seq_lens": lengths, "num_head": heads, **more,
        }  # fmt: skip
    spread = np.repeat(lengths, heads)
    wins = rng.integers(0, spread + 1)
    more |= {"num_head": heads, "wins": wins, "compress_type": KVHEAD}
    return functools.partial(tables_of, kvkit.ascend.compressed_slots), {"seq_lens": lengths, **more}


KINDS = (
    *(key_value_cache, key_value_cache, attend, attend, attend, plan, merge, positions, positions),
    *(reshape, reshape, blocks, matrices, paged, paged, tables, pools, pools, pools),
)
WITHOUT_OUT = (
    *(by_plan, kvkit.ascend.reshape_and_cache, kvkit.ascend.block_copy),
    *(kvkit.paged_append, kvkit.swap_blocks),
)


# Their arguments elsewhere, and changed


def mapped(tree, change):
    """The same arguments with another value for each that is no mapping or list."""
    if isinstance(tree, dict):
        return {name: mapped(value, change) for name, value in tree.items()}
    return [mapped(value, change) for value in tree] if isinstance(tree, list) else change(tree)


def leaves(tree, name=""):
    """(the nearest name, the value) of each."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in leaves(value, key)]
    if isinstance(tree, list):
        return [leaf for value in tree for leaf in leaves(value, name)]
    return [(name, tree)]


def arrays_of(tree):
    return [value for _, value in leaves(tree) if isinstance(value, np.ndarray)]


def changed(rng, value):
    """A number or one of an array a little off or far outside; an array with a row less."""
    if not isinstance(value, np.ndarray):
        return value + int(one(rng, NEAR))
    value = value.copy()
    if value.dtype.kind == "i" and value.itemsize > 1 and value.size and rng.random() < 0.7:
        at = int(rng.integers(value.size))
        if rng.random() < 0.5:
            at = int(np.where(value < 2**32, value, -1).argmax())
        far = (-1, INT64_MAX, INT64_MIN, 2**40)
        near = value.flat[at] + one(rng, NEAR) if abs(int(value.flat[at])) < 2**62 else 0
        value.flat[at] = near if rng.random() < 0.7 else one(rng, far)
        return value
    axis = int(rng.integers(value.ndim))
    cut = slice(1, None) if rng.random() < 0.3 else slice(None, -1)
    return np.ascontiguousarray(value[(slice(None),) * axis + (cut,)])


def with_a_change(rng, tree):
    able = [
        (i, name)
        for i, (name, value) in enumerate(leaves(tree))
        if type(value) is int or isinstance(value, np.ndarray)
    ]
    places = [pair for pair in able if pair[1] in PLACES]
    wrong, _ = one(rng, places if places and rng.random() < 0.7 else able)
    number = itertools.count()
    return mapped(tree, lambda value: changed(rng, value) if next(number) == wrong else value)


class Places:
    """Puts arrays where their memory ends, or ordinary copies; both with the same order of axes."""

    def __init__(self, rng, tree):
        count = len(leaves(tree))
        self.ends = rng.choice([END, END, END, BEGIN], count)
        self.seeds = rng.integers(2**32, size=count) * (rng.random(count) < 0.15)

    def put(self, tree, border):
        number = itertools.count()

        def place(value):
            i = next(number)
            if not isinstance(value, np.ndarray):
                return value
            order = np.arange(value.ndim)
            if self.seeds[i]:
                np.random.default_rng(self.seeds[i]).shuffle(order[:-1])
            turned = np.ascontiguousarray(value.transpose(order))
            turned = at_border(turned, self.ends[i]) if border else turned.copy()
            return turned.transpose(np.argsort(order))

        return mapped(tree, place)


def seen(results, tree):
    """All bits that a call has made or written."""
    return [(array.shape, array.dtype.str, array.tobytes()) for array in arrays_of([results, tree])]


def run(function, tree, **more):
    """(results, or the words of a refusal; all bits). More tokens than any memory holds are legal."""
    try:
        results = function(**tree, **more)
    except (KvkitError, MemoryError) as error:
        return str(error), seen([], tree)
    results = list(results) if isinstance(results, tuple) else results
    return results, seen(results, tree)


def check(rng):
    """What was called, what came of it, and how many calls stood at borders."""
    kind = one(rng, KINDS)
    function, tree = kind(rng)
    if broken := rng.random() < 0.5:
        tree = with_a_change(rng, tree)
    places = Places(rng, tree)
    results, bits = run(function, places.put(tree, True))
    expected, same = run(function, places.put(tree, False))
    if isinstance(expected, str):
        assert broken, expected
        assert results == expected
        assert bits == same
        assert function is by_plan or bits == seen([], tree)  # of several calls the last may be refused
        return kind.__name__, "refused", 1
    assert not isinstance(results, str), results
    assert bits == same
    if function in WITHOUT_OUT or isinstance(function, functools.partial):
        return kind.__name__, "changed" if broken else "legal", 1
    full = [
        np.full(array.nbytes, 0xFF, np.uint8).view(array.dtype).reshape(array.shape)
        for array in arrays_of(results)
    ]
    out = [at_border(array, one(rng, (END, END, BEGIN))) for array in full]
    _, bits = run(function, places.put(tree, True), out=tuple(out) if isinstance(results, list) else out[0])
    assert bits == same
    return kind.__name__, "changed" if broken else "legal", 2


def fuzz(count, seed, first=0):
    """Some calls with all threads, some past the caches, as large ones are."""
    warnings.simplefilter("error")
    usual = [getattr(*where) for where in THRESHOLDS]
    found = collections.Counter()
    for number in range(first, first + count):
        print(number, flush=True)
        rng = np.random.default_rng([seed, number])
        for where, size in zip(THRESHOLDS, usual, strict=True):
            setattr(*where, 0 if rng.random() < 0.2 else size)
        name, outcome, calls = check(rng)
        found.update({name: 1, outcome: 1, "calls at borders": calls})
    return found


if __name__ == "__main__":
    print(json.dumps(fuzz(*map(int, sys.argv[1:]))))
