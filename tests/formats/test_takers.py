"""Every place that takes a format takes the texts of one grammar, or refuses them and says what works."""

import importlib
import inspect
import re

import numpy as np
import pytest
from public_names import MODULES

import kvkit
from benchmarks.suites import catalog
from kvkit import formats, tools
from kvkit.cache import CompressedLayer, LatentLayer, PagedCache, QuantizedCache, QuantizedLayer, QuantSpec
from kvkit_cli import bench, warm
from kvkit_cli.main import VERBS

STATES = np.linspace(-1, 1, 2 * 6 * 64, dtype=np.float32).reshape(1, 2, 6, 64)  # [batch, heads, tokens, dim]


def quantized(text):
    cache = QuantizedCache(text, num_layers=1)
    cache.update(STATES, STATES, 0)
    return cache.attend(STATES[:, :, -1:], 0)


def paged(text):
    cache = PagedCache(4, 4, 1, 2, 64, np.float32, format=text)
    cache.update(STATES, STATES, 0)
    return cache.attend(STATES[:, :, -1:], 0)


def latent(text):
    layer = LatentLayer(512, 64, format=text)
    rows = np.ones((1, 1, 3, 576), np.float32)
    layer.update(rows[..., :512], rows[..., 512:])
    return layer.attend(rows[:, :, -1:, :512], rows[:, :, -1:, 512:], softmax_scale=0.1)


def layer(text):
    layer = QuantizedLayer(text)
    layer.update(STATES, STATES)
    return layer.attend(STATES[:, :, -1:])


def warmed(text):
    return list(warm.parse_formats([text], "float16", 64, 4))


def listed(text):
    """Return the cases of `kvkit bench --only`, which knows the formats that some case measures."""
    chosen = [
        case.name for cases in catalog.SUITES.values() for case in cases if bench.is_chosen(case.name, text)
    ]
    if not chosen:
        raise kvkit.KvkitError(f"--only: expected text of a case, got {text}")
    return chosen


PAIR = {name: np.ascontiguousarray(STATES[0].swapaxes(0, 1))[None] for name in ("key", "value")}
MODEL = {"num_hidden_layers": 2, "n_head": 2, "n_head_kv": 2, "head_dim": 64}
TAKERS = {  # {what takes a format, and its argument: a call with a text}
    "kvkit.cache.QuantSpec(format)": QuantSpec, "kvkit.QuantizedCache(format)": quantized,
    "kvkit.PagedCache(format)": paged, "kvkit.cache.LatentLayer(format)": latent,
    "kvkit.cache.QuantizedLayer(format)": layer,
    "kvkit.cache.CompressedLayer(format)": lambda text: CompressedLayer(512, 64, 6, format=text),
    "kvkit.formats.encode(format)": lambda text: formats.encode(STATES, text),
    "kvkit.formats.named(format)": formats.named,
    "kvkit.size(formats)": lambda text: tools.size(MODEL, tokens=64, formats=text),
    "kvkit.study(schemes)": lambda text: tools.study(PAIR, text),
    "kvkit.convert(format)": lambda text: tools.convert(PAIR, None, format=text),
    "kvkit warm --formats": warmed, "kvkit bench --only": listed,
}  # fmt: skip
# Arguments with these words that are another's own, or take what a call above has made or checked
OWN = {
    "kvkit.formats.decode(format)": "of encoded arrays", "kvkit.convert(from_format)": "of encoded arrays",
    "kvkit.mla_append(format)": "of latent rows", "kvkit.mla_attention(format)": "of latent rows",
    "kvkit.paged_attention(quant_format)": "e4m3 or e5m2 bytes of pools, as kernels name them",
    **dict.fromkeys(
        (f"kvkit.{where}(quant_format)" for where in (
            "PagedCache", "key_value_cache", "multi_head_cache_attention", "dynamic_batching.key_value_cache",
            "dynamic_batching.multi_head_cache_attention",
        )), "PMX's own word",
    ),
    "kvkit.ascend.paged_cache_load(cache_format)": "Ascend's own word",
    "kvkit.ascend.reshape_and_cache(cache_format)": "Ascend's own word",
    "kvkit.files.Description(format)": "the kind of a file",
    "kvkit size --formats": "kvkit.size", "kvkit study --schemes": "kvkit.study",
    "kvkit convert --format": "kvkit.convert", "kvkit convert --from-format": "kvkit.convert",
}  # fmt: skip


def takers():
    """Yield every public argument, and every option of the shell, whose word says that it takes a format."""
    seen = set()
    for module in MODULES:
        for name in dir(module):
            function = getattr(module, name)
            if not callable(function) or id(function) in seen or name.startswith("_"):
                continue
            seen.add(id(function))
            try:
                words = inspect.signature(function).parameters
            except ValueError:  # of some built-in
                continue
            yield from (f"{module.__name__}.{name}({word})" for word in words if WORD.search(word))
    for verb, (path, _) in VERBS.items():
        command = getattr(importlib.import_module(path), path.rpartition(".")[2])
        options = [option for each in command.params for option in each.opts if WORD.search(option)]
        yield from (f"kvkit {verb} {option}" for option in options)


WORD = re.compile(r"format|scheme$|schemes$")


def test_all_takers_are_known():
    """An argument that takes a format is in TAKERS, or in OWN with the reason why its words are others."""
    assert sorted({*takers(), "kvkit bench --only"}) == sorted(TAKERS | OWN)


NAMED = "kvkit.formats.named(format)"
TOOLS = {"kvkit.size(formats)", "kvkit.study(schemes)"}
ANY = TOOLS | {
    "kvkit.formats.encode(format)",
    "kvkit.convert(format)",
    "kvkit.formats.named(format)",
}  # do not attend
CODES = {
    "kvkit.cache.QuantSpec(format)",
    "kvkit.QuantizedCache(format)",
    "kvkit.cache.QuantizedLayer(format)",
}
PAGED, WARM, BENCH = "kvkit.PagedCache(format)", "kvkit warm --formats", "kvkit bench --only"
FLOATS = TOOLS | {"kvkit.convert(format)", WARM}
TAKEN = dict.fromkeys(
    ["int8:g32", "int4:g32", "int8", "fp8", "fp8:g32", "e4m3", "e5m2", "q8_0", "q4_0"], CODES | ANY | {PAGED}
)  # {text: who takes it}
TAKEN |= {
    "kivi4": CODES | TOOLS, "int4:g32+hadamard": CODES | TOOLS, "uint4:g32": CODES | ANY, "int2": CODES | ANY,
    "float32": FLOATS | {PAGED}, "float16": FLOATS, "bfloat16": FLOATS, "mxfp4": ANY, "turbo_v4": ANY,
    "nonsense": set(), "int5": set(), "int8:g0": set(), "ds_mla": {"kvkit.cache.LatentLayer(format)", NAMED},
    "ds_v4": {"kvkit.cache.CompressedLayer(format)", NAMED},
}  # fmt: skip
for text in ("int8:g32", "int4:g32", "int8"):
    TAKEN[text] = TAKEN[text] | {WARM}
for text in (
    "int8:g32",
    "int4:g32",
    "int8",
    "fp8",
    "e4m3",
    "q8_0",
    "q4_0",
    "float32",
    "float16",
    "bfloat16",
    "int2",
):
    TAKEN[text] = TAKEN[text] | {BENCH}


@pytest.mark.parametrize("taker", TAKERS)
def test_every_taker_takes_every_text_or_says_what_works(taker):
    for text, takers in TAKEN.items():
        if taker in takers:
            assert TAKERS[taker](text) is not None
            continue
        with pytest.raises(kvkit.KvkitError, match=r"expected .*, got "):
            TAKERS[taker](text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int8:g16", {"quant_bit": 8, "quant_group": 16}),
        ("int4:float32", {"quant_bit": 4, "quant_group": 32, "scale_dtype": "float32"}),
        ("fp8", {"quant_format": "e4m3"}), ("q8_0", {"quant_format": "q8_0"}), ("float32", {}),
        ("e5m2:g32", {"quant_format": "e5m2", "scale": "found", "quant_group": 32}),
    ],
)  # fmt: skip
def test_a_format_of_pages_stands_for_words_of_pmx(text, words):
    """The caches share prefixes, so what they store is the same."""
    one, two = (PagedCache(4, 4, 1, 2, 64, np.float32, **each) for each in ({"format": text}, words))
    assert one.store.identity == two.store.identity
    with pytest.raises(kvkit.KvkitError, match="format: expected None beside quant_bit"):
        PagedCache(4, 4, 1, 2, 64, np.float32, format=text, quant_bit=8)
