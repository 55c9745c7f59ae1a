"""What tools refuse: a row for each wrong call, with the words of its error."""

import numpy as np
import openvino_blocks
import pytest

from kvkit import KvkitError, files, tools
from kvkit.layouts import tables
from kvkit.tools import check, convert, diff, draw, size, vectors
from kvkit.tools.readers import open_cache
from kvkit.tools.source import CacheSource

pytestmark = pytest.mark.cpu

HEADS, TOKENS, ROWS, DIM = 3, 96, 16, 32
RNG = np.random.default_rng(1)
KEY, VALUE = RNG.standard_normal((2, 2, TOKENS, HEADS, DIM)).astype(np.float16)
QUERY = RNG.standard_normal((2, 2, ROWS, 2 * HEADS, DIM)).astype(np.float16)
DUMP = {"key": KEY, "value": VALUE, "query": QUERY, "seqstarts": np.array([0, 40, TOKENS])}
PLAIN = {"key": KEY, "value": VALUE}
LATENT = np.ones((2, 40, 576), np.float32)
POOL, CODES = np.zeros((3, 4, 8, 2), np.float32), np.zeros((1, 2, 5, 2, 64), np.int8)
ZEROS, ONES, STATE = {"x": np.zeros(2)}, {"x": np.ones(2)}, {"recurrent_state": np.zeros((1, 6, 4, 4))}
ROWS_OF_PAGES = {"kv_indptr": [0, 2, 3], "kv_indices": [5, 2, 7], "kv_last_page_len": [3, 2]}
JOINED = {"cache": [[np.zeros((1, 2, 5, 8), np.float16)] * 2], "slots": np.arange(4)}
TABLE, OPENVINO = tables.from_blocks([[1]], [4], 4), openvino_blocks.written("u8")
MIXED = "int2:g16,int4:g16,int8:g16"
GPT_OSS, DEEPSEEK = "gpt-oss-20b", "deepseek-v3"
FILES = {
    "syntax.py": "class (:\n", "missing.py": "import nowhere_at_all\n", "quits.py": "raise SystemExit(3)\n",
    "takes.py": "class A:\n    def __init__(self, x):\n        pass\n", "a.gguf": "GGUF\3\0\0\0",
    "b.json": "{", "c.json": "[]", "empty.json": "", "there/x": "",
}  # fmt: skip


def study(schemes, arrays=DUMP, **options):
    return lambda: tools.study(arrays, schemes, **options)


def evict(policies, arrays=DUMP, **options):
    return lambda: tools.study(arrays, evict=policies, **options)


def mix(arrays=DUMP, **options):
    return lambda: tools.study(arrays, **{"schemes": MIXED} | options)


def masked(mask, arrays=DUMP):
    """Return a study of one sequence, or of others, with a mask."""
    one = {"key": KEY[:, :40], "value": VALUE[:, :40], "query": QUERY[:, :1]} if arrays is DUMP else arrays
    return study("fp8", one | {"attn_mask": mask})


def call(function, *arguments, **options):
    return lambda: function(*arguments, **options)


def recoded(dtype=np.float32, **options):
    source = {"cache": np.zeros((1, 2, 4, 1, 34), dtype)}
    return lambda: convert(source, None, **{"from_layout": "| b kv n h c"} | options)


def at(array, place, number):
    changed = array.copy()
    changed[place] = number
    return changed


GOOD = np.ones((1, 40), bool)
SHORT_KEYS = {"key": np.ones((2, 3, 4), np.float32), "value": np.ones((2, 2, 4), np.float32)}
FLAT = {"key": np.zeros((2, 3, 4, 5), np.float32), "value": np.zeros(120, np.float32)}
REFUSED = [
    # check
    ("source: expected a path, a dict of arrays or a cache", call(check, 7)),
    # diff
    ("b: expected some array of x, got y", call(diff, ZEROS, {"y": np.zeros(2)})),
    ("ulp: expected at least 0", call(diff, ZEROS, ZEROS, ulp=-1)),
    ("layout: expected an array cache", call(diff, ZEROS, ZEROS, layout_a="b n h c")),
    ("a: expected some array of numbers, got none", call(diff, {}, {})),
    ("axes: expected each of l b n h c .* 'foo'", call(diff, ZEROS, ONES, axes="foo")),
    ("axes: expected 1 letters, .* 'n c'", call(diff, ZEROS, ONES, axes="n c")),
    ("source: expected a path, a dict of arrays or a cache", call(diff, 3, ZEROS)),
    ("plot: (expected a name .*svg|needs matplotlib)", call(diff, ZEROS, ONES, plot="o.txt")),
    (r"like: expected floats .* got tokens \(5, 2\)",
     call(diff, {"key": KEY}, {"key": KEY + 1}, like={"tokens": np.zeros((5, 2), np.float16)})),
    # draw
    ("num_rows: expected 8 to", call(draw.cells, TABLE, 7)),
    ("filled: expected a boolean for each of 8 rows", call(draw.cells, TABLE, 8, filled=[True])),
    ("kind: expected 'text' or 'svg'", call(draw.cells, TABLE, kind="png")),
    ("sizes: expected positive integers", call(draw.layout, "hf", sizes={"n": 0})),
    ("sizes: expected arrays of at most", call(draw.layout, "hf", sizes={"n": 10**6})),
    ("a size of c that 16 divides", call(draw.layout, "ascend-nz", sizes={"c": 9})),
    # sources: what is no cache
    *((text, wrong) for text, arrays in (
          ("value_cache: expected an array, beside key_cache, got None", {"key_cache": POOL}),
          ("layout: expected a layout, as the file does not name one", {"cache": np.zeros((2, 3, 4, 5))}),
          ("source: expected an array 'cache' and its layout", {"a": np.zeros(3)}),
          (r"or their names \(keys='a' values='b', say\), got a, b$", {"a": POOL, "b": POOL}),
          (r"or a pattern \(fused=past, say, and its layout\), got past$", {"past": POOL}),
          ("^value: expected", SHORT_KEYS),
          (r"layout: expected a layout without an axis kv, as .* arrays of their own \('n h c', say\)",
           {"key": np.zeros((2, 3, 4)), "value": np.zeros((2, 3, 4)), "layout": "| kv n h c"}),
          (r"got an array of float32 and shape \(4, 8, 2\) \(without a list of layers .* 'b n h c'\)$",
           {"key_cache": POOL, "value_cache": POOL, "layout": "l | b n h c"}))
      for wrong in (study("fp8", arrays), call(convert, arrays, None, to_layout="hf"))),
    (r"value: expected the axes .*, got an array of float32", call(tools.inspect, FLAT)),
    (r"got my_keys, w0, w1, w2, w3 and 56 more$",
     study("fp8", {f"w{i}": np.zeros(3) for i in range(60)} | {"my_keys": np.zeros(3)})),
    (r"^compressed rows, page 0 of sequence 1: expected a page of the pool, 0 to 5 \(see .*, got 7$",
     study("fp8", {"cache": [np.zeros((6, 2, 4, 2, 16), np.float32)], "layout": "l | b kv n h c"}
           | ROWS_OF_PAGES)),
    ("format: expected the format of codes, as the file does not name it, got int8",
     call(open_cache, {"cache": CODES}, "| l kv n h c")),
    ("format: expected a format that encodes each token by itself",
     call(open_cache, files.Contents({"cache": CODES[:, :, None]}, {}, description=files.Description(
         "| l kv b n h c", format="kivi_key2")))),
    ("to_layout: expected a format instead",
     call(convert, OPENVINO, None, from_layout="openvino-u8", to_layout="hf")),
    ("source: expected arrays key_cache and value_cache, for openvino-u8",
     call(CacheSource, {"key": OPENVINO["key_cache.0"]}, "openvino-u8")),
    ("key_cache: expected",
     call(CacheSource, OPENVINO | {"key_cache.0": np.zeros((3, 2, 8, 64), np.uint8)}, "openvino-u8")),
    ("value_cache: expected",
     call(CacheSource, OPENVINO | {"value_cache.0": np.zeros((3, 2, 8))}, "openvino-u8")),
    # convert
    ("format: expected a format that", recoded(format="q9_0")),
    ("to_layout: expected a layout, or a format", recoded()),
    ("to_layout: expected a layout, or a format", recoded(format="q8_0", to_layout="hf")),
    ("verify: expected none with a format, for which rows do not move", recoded(format="q8_0", verify=True)),
    ("scale: expected a number", recoded(format="ort_int8")),
    ("from_format: expected the format of codes", recoded(np.uint8, format="float32")),
    *((text, call(convert, STATE, None, **options)) for text, options in (
        ("from_states: expected the order of states, KV, VK, .*as no shape tells it, got No",
         {"states": "KV"}),
        ("states: expected the order of states", {"states": "kv", "from_states": "VK"}),
        ("state_heads: expected KEY/VALUE", {"states": "KV", "from_states": "VK:tiled"}),
        ("state_heads: expected KEY/VALUE",
         {"states": "KV", "from_states": "VK:tiled", "state_heads": "4"}),
        ("state_heads: expected a multiple",
         {"states": "KV", "from_states": "VK:tiled", "state_heads": "4/6"}),
        ("state_heads: expected 6 heads", {"states": "KV", "from_states": "VK:tiled", "state_heads": "2/4"}),
        ("states: expected the order", {"state_heads": "2/6"}))),
    ("states: expected arrays of states by name|state",
     call(convert, {"router": np.zeros((1, 2))}, None, states="KV", from_states="VK")),
    # join
    *((text, call(tools.join, [JOINED, other], layout="hf")) for text, other in (
        ("but for its heads", {"cache": [[np.zeros((1, 2, 6, 8), np.float16)] * 2], "slots": np.arange(4)}),
        ("sources: expected equal slots, got others in arrays", JOINED | {"slots": np.arange(5)}),
        ("sources: expected equal block_tables", JOINED | {"block_tables": [[0]]}),
        ("layers as arrays has, 1, got 2 in arrays", {"cache": JOINED["cache"] * 2, "slots": np.arange(4)}))),
    ("axis: expected 'h', the heads, or 'n', the tokens, got 'x'",
     call(tools.join, [JOINED], axis="x", layout="hf")),
    ("each rank has all latent rows",
     call(tools.join, [{"cache": [np.ones((4, 16, 24), np.float16)]}] * 2, layout="l | b n c")),
    ("scales in", call(tools.join, [JOINED | {"scale": np.ones(3)}], layout="hf")),
    # study: schemes and numbers
    ("schemes: expected one or more", study("")),
    ("format: expected a format that", study("int5")),
    ("schemes: expected each once", study("int4,int4")),
    ("rotation: expected", study("int4+spin")),
    ("a multiple of 48", study("int4:g48")),
    ("scheme: expected a Python file", study("nowhere.py:Mine")),
    ("scheme: expected methods encode and decode", study([object()])),
    (r"syntax.py:A: expected a Python file that runs, got SyntaxError \(.*line 1", study("syntax.py:A")),
    (r"missing.py:A: expected a Python file that runs, got ModuleNotFoundError", study("missing.py:A")),
    (r"quits.py:A: expected a Python file that runs, got SystemExit", study("quits.py:A")),
    (r"takes.py:A: expected a class whose .* no arguments, got TypeError \(.*'x'", study("takes.py:A")),
    ("takes.py: expected a class 'B'", study("takes.py:B")),
    *(("source: expected a cache that holds tokens, got",
       study("fp8", dict.fromkeys(PLAIN, np.zeros(shape, np.float16))))
      for shape in ((1, 0, 2, 8), (1, 5, 0, 8), (1, 5, 2, 0))),
    (r"seqstarts: expected integers .* 0 to 96, .* got \[5, 90\]",
     study("fp8", DUMP | {"seqstarts": np.array([5, 90])})),
    ("expected float32, float16 or bfloat16", study("fp8", PLAIN | {"key": KEY.view(np.uint16)})),
    *(("uint16", study("fp8", dict.fromkeys(PLAIN, np.random.default_rng(1).integers(
        0, most, KEY.shape).astype(np.uint16)))) for most in (256, 2**16)),
    *((f"^arrays, layer 1, {where}: expected finite numbers, got {what} in head 2, token {place[-3]}$",
       study("fp8,int4:g32", DUMP | {name: at(DUMP[name], place, number)}))
      for number, what in ((np.nan, "NaN"), (np.inf, "infinity")) for name, place, where in (
          ("key", (1, 50, 2, 9), "keys"), ("query", (1, 1, 3, 2, 9), "queries of sequence 1"))),
    ("fp16, layer 0: decode: expected finite numbers, got infinity",
     study("fp16", PLAIN | {"key": KEY.astype(np.float32) * 1e6})),
    (r"threshold: expected a positive number, as 0\.1 for 10 %, got 0", study("fp8", threshold=0)),
    (r"^softmax_scale: expected a number with query",
     study("ds_mla", {"latent": LATENT, "query": np.ones((2, 1, 5, 3, 576), np.float32)})),
    (r"^evict: expected no policies, for latent rows", evict("knorm@0.5", {"latent": LATENT})),
    (r"^latent: expected \[layers, tokens, dim\]", study("ds_mla", {"latent": LATENT[0]})),
    # study: masks
    (r"^attn_mask: expected a padding mask \[1, 40\] of 0 and 1, one for each token, got",
     masked(GOOD[:, :-1])),
    ("^attn_mask: expected a padding mask", masked(np.where(GOOD, 0.0, -np.inf))),
    ("^attn_mask: expected a padding mask", masked(np.ones((1, 1, 40, 40), bool))),
    ("^attn_mask: expected a padding mask", masked(GOOD * 2)),
    ("^attn_mask: expected a token or more in each sequence", masked(~GOOD)),
    ("^attn_mask: expected padding before the tokens, as query has the last tokens",
     masked(at(GOOD, np.s_[:, -3:], False))),
    ("^attn_mask: expected none beside page tables or seqstarts",
     study("fp8", DUMP | {"attn_mask": np.ones((2, 48), bool)})),
    # study: policies
    ("^evict: expected a share above 0 and at most 1, as snapkv@0.5, got snapkv@50$", evict("snapkv@50")),
    ("^evict: expected a share above 0 and at most 1, as snapkv@0.5, got snapkv@half$", evict("snapkv@half")),
    ("^evict: expected a share of the tokens to keep, as snapkv@0.5, got snapkv$", evict("snapkv")),
    (r"^evict: expected a scorer of tokens that .* got 'snapk' \(did you mean snapkv", evict("snapk@0.5")),
    ("^evict: expected a scorer of tokens", evict("quest@0.5")),
    (r"^evict: expected options as in snapkv\(window=32,pool=max\)@0.5, got", evict("snapkv(4)@0.5")),
    (r"^snapkv\(width=4\)@0.5, layer 0: snapkv: expected options among window", evict("snapkv(width=4)@0.5")),
    ("^evict: expected at least one SCORER@SHARE, as snapkv@0.5, beside schemes", evict("int4:g32")),
    ("^evict: expected each entry once", evict("knorm@0.5,knorm@0.5")),
    ("^evict: expected each entry once", evict("knorm@0.5,knorm@.5")),
    (r"^evict: expected options as in snapkv\(window=32,pool=max\)@0.5, got", evict("snapkv(window=32@0.5")),
    ("^evict: expected oracle without options", evict("oracle(x=1)@0.5")),
    ("^evict: expected SCORER@SHARE", evict([np.array([1, 2])])),
    ("^scorer: expected a Python file and a function in it", evict("nowhere.py:f@0.5")),
    ("^evict: expected SCORER@SHARE", evict([object()])),
    ("^evict: expected a text or a sequence, .* got int 5$", evict(5)),
    ("^evict: expected a share above 0", evict([(np.mean, "half")])),
    ("^budget: expected .*pyramid", evict("knorm@0.5", budget="duo")),
    ("^judge: expected at most 16, the queries of the source, got 17$", evict("knorm@0.5", judge=17)),
    ("^tova@0.5, layer 0: query: expected queries before .* tova", evict("tova@0.5", judge=16)),
    ("^expected@0.5, layer 0: rope: expected a value, which expected needs, got None$",
     evict("expected@0.5")),
    ("^kvzip@0.5, layer 0: weights: expected weights", evict("kvzip@0.5")),
    ("scorer: expected a function that returns scores .*ZeroDivisionError", evict([(lambda *_: 1 / 0, 0.5)])),
    ("scores: expected numbers, got nan", evict([(lambda _, keys, *rest: keys[..., 0] * np.nan, 0.5)])),
    (r"scores: expected shape \(1, 3, 36\)", evict([(lambda _, keys, *rest: keys[:, :, 1:, 0], 0.5)])),
    (r"^snapkv@0.5, layer 0: query: expected queries before", evict("snapkv@0.5", PLAIN)),
    ("layer 1, keys: expected finite numbers, got NaN in head 2, token 3",
     evict("knorm@0.5", PLAIN | {"key": at(KEY, (1, 3, 2, 1), np.nan)})),
    *((r"got query is not .*, but as transformers orders.*2 and 3 of query",
       call(tools.study, DUMP | {"query": QUERY.swapaxes(2, 3)}, **work))
      for work in ({"evict": "tova@0.5"}, {"schemes": "fp8"})),
    # study: mixes
    ("bits: expected what a mix of these formats reaches: 3.00 bits at the least", mix(bits=2)),
    ("error: expected what a mix of these formats reaches: an error of", mix(error=1e-6)),
    ("bits: expected bits or an error, not both", mix(bits=4, error=0.1)),
    ("bits: expected a number above 0", mix(bits=0)),
    ("error: expected a number below 1, as 0.05 for 5 %", mix(error=5)),
    ("evict: expected None", mix(bits=4, evict="knorm@0.5")),
    ("schemes: expected formats that a QuantizedCache stores", mix(bits=4, schemes="nvfp4,mxfp4")),
    ("source: expected two queries or more of each sequence", mix(bits=4, judge=ROWS)),
    ("source: expected queries, because a mix is chosen by the errors", mix(PLAIN, bits=5)),
    ("study: expected bits or an error, for which it finds a mix",
     lambda: tools.study(PLAIN, "int8:g16").save_mix("mix.json")),
    # study: scales
    ("^per: expected", call(tools.write_scales, PLAIN, "s.safetensors", "channel")),
    ("^target: expected a name with the suffix .safetensors",
     call(tools.write_scales, PLAIN, "s.npz", "head")),
    ("^source: expected layers of keys and values",
     call(tools.write_scales, {"latent": LATENT}, "s.safetensors", "head")),
    ("layer 0, keys: expected finite",
     call(tools.write_scales, PLAIN | {"key": KEY * np.float16(np.inf)}, "s.safetensors", "head")),
    # size
    *((rf"{name}: ", call(size, name)) for name in ("a.gguf", "b.json", "c.json")),
    *(("tokens: expected", call(size, GPT_OSS, tokens=text)) for text in (
        "0", "-1", "k", "1.5", "0.0001k", "8G", "8kB", "9" * 30, 0, True, 1.5, [None])),
    ("fit: expected a number of bytes", call(size, GPT_OSS, fit="much")),
    (r"got '24' without one \(did you mean 24GiB\?\)", call(size, GPT_OSS, fit="24")),
    (r"lama-3\.1-8: expected a file, a folder, or a model as llama-3.1-8b", call(size, "lama-3.1-8")),
    (r"config\.json: no such file: check the name", call(size, "there")),
    (r"neither a config\.json nor a GGUF file: it is empty", call(size, "empty.json")),
    ("no such file: check the name", call(size, "nothing.json")),
    ("sink: expected None but for engine 'kvkit'", call(size, GPT_OSS, sink=3)),
    (r"format: expected .* which attention reads in place .* got 'mxfp4'",
     call(size, GPT_OSS, formats="mxfp4", engine="kvkit")),
    ("formats: expected floats for layers of kind latent",
     call(size, DEEPSEEK, formats="q8_0", engine="kvkit")),
    ("weights: expected fit", call(size, GPT_OSS, weights="1GB")),
    ("weights: expected at most the .* of fit, got 2GB", call(size, GPT_OSS, fit="1GB", weights="2GB")),
    # vectors
    (r"operator: expected .* suite ascend: ascend.resh.*, got 'dance'$",
     call(vectors.make, "none", "ascend", operator="dance")),
    (r"operator of any suite: key_value_cache, .*, got 'dance'$",
     call(vectors.make, "none", operator="dance")),
    *((rf"got '{name}' \(did you mean ascend.reshape_and_cache.*\)$",
       call(vectors.make, "none", operator=name)) for name in ("reshape_and_cache", "ReshapeAndCache")),
    ("there is something already", call(vectors.make, "there")),
    ("shapes: expected some of num_kv_heads, head_dim, page_size, batch, got 'head'",
     call(vectors.make, "none", shapes={"head": 3})),
    ("shapes: batch: expected at least 2, got 1", call(vectors.make, "none", shapes={"batch": 1})),
    ("shapes: head_dim: expected a multiple of 16, got 24",
     call(vectors.make, "none", shapes={"head_dim": 24})),
]  # fmt: skip


@pytest.mark.parametrize(("message", "wrong"), REFUSED)
def test_refused(message, wrong, tmp_path, monkeypatch):
    """The error has these words, and no file is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(KvkitError, match=message):
        wrong()
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert {name for name in found if "__pycache__" not in name} == {*FILES, "there"}
