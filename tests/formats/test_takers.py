"""Every place that takes a format takes the texts of one grammar, or refuses them and says what works."""

import numpy as np
import pytest

import kvkit
from kvkit import formats, tools
from kvkit.cache import LatentLayer, PagedCache, QuantizedCache, QuantSpec

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


PAIR = {name: np.ascontiguousarray(STATES[0].swapaxes(0, 1))[None] for name in ("key", "value")}
MODEL = {"num_hidden_layers": 2, "n_head": 2, "n_head_kv": 2, "head_dim": 64}
TAKERS = {
    "QuantSpec": QuantSpec, "QuantizedCache": quantized, "PagedCache": paged, "LatentLayer": latent,
    "formats.encode": lambda text: formats.encode(STATES, text),
    "size": lambda text: tools.size(MODEL, tokens=64, formats=text),
    "study": lambda text: tools.study(PAIR, text),
    "convert": lambda text: tools.convert(PAIR, None, format=text),
}  # fmt: skip
TOOLS = {"size", "study"}
ANY = TOOLS | {"formats.encode", "convert"}  # read and write, and do not attend
CODES = {"QuantSpec", "QuantizedCache"}
TAKEN = dict.fromkeys(
    ["int8:g32", "int4:g32", "int8", "fp8", "fp8:g32", "e4m3", "e5m2", "q8_0", "q4_0"],
    CODES | ANY | {"PagedCache"},
)  # {text: who takes it}
TAKEN |= {
    "kivi4": CODES | TOOLS, "int4:g32+hadamard": CODES | TOOLS, "uint4:g32": CODES | ANY, "int2": CODES | ANY,
    "float32": TOOLS | {"convert", "PagedCache"}, "float16": TOOLS | {"convert"},
    "bfloat16": TOOLS | {"convert"}, "mxfp4": ANY, "turbo_v4": ANY, "nonsense": set(), "int5": set(),
    "int8:g0": set(), "ds_mla": {"LatentLayer"},
}  # fmt: skip


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
