"""Mixes of formats: a text says what each layer stores; what it leaves open or says twice is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkit.errors import KvkitError
from kvkit.formats.mixes import mix_named, mix_text, split_formats

pytestmark = pytest.mark.cpu

FORMATS = st.sampled_from(("int8", "int4:g32", "uint4:channel", "int4:g32+hadamard", "kivi2", "fp8"))


@given(st.lists(st.tuples(FORMATS, FORMATS), min_size=1, max_size=12))
def test_the_text_of_a_mix_says_its_formats(pairs):
    text = mix_text(pairs)
    assert mix_named(text).of_layers(len(pairs)) == pairs
    assert mix_text(mix_named(text).of_layers(len(pairs))) == text
    numbers = [3 * i for i in range(len(pairs))]  # of some layers of a model
    assert mix_named(mix_text(pairs, numbers)).of_numbers(numbers) == pairs
    assert split_formats(f"q8_0, {text},{text},int2") == ["q8_0", text, text, "int2"]


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        ("int8@0,1,-1/int4:g32", "8 8 4 4 8"),
        ("int8@1:3/int4:g32", "4 8 8 4 4"),
        ("int4:g32@1::2/int8@0,-3:-2,4", "8 4 8 4 8"),
        ("int8 @ 0, 2 / int4:g32", "8 4 8 4 4"),
        ("int4:g32", "4 4 4 4 4"),
    ],
)
def test_layers_of_a_mix(text, formats):
    names = {"8": "int8", "4": "int4:g32"}
    expected = [names[each] for each in formats.split()]
    assert mix_named(text).of_layers(5) == list(zip(expected, expected, strict=True))
    assert mix_named(f"K={text},V=fp8").of_layers(5) == [(each, "fp8") for each in expected]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int8@0,0/int4", "each layer once, got layer 0 twice"),
        ("int8@0/int2@-4/int4", "each layer once, got layer 0 twice"),
        ("int8@4/int4", "layers from -4 to 3, got 4 in"),
        ("int8@-5/int4", "layers from -4 to 3, got -5 in"),
        ("int8@0,1", "a format for layer 2, as in 'int8@0,1/int4:g32'"),
        ("int8@:/int4", "a layer for int4, of 4"),
        ("int8/int4@0/int2", "layers after each format but the last"),
        ("q8_0/q4_0@0", "layers after each format but the last"),
        ("@0/int4", "layers after each format but the last"),
        ("int8@one/int4", "numbers and ranges, as 0,2,4: or 1::2, got one"),
        ("int8@/int4", "numbers and ranges"),
        ("int8@1::0/int4", "numbers and ranges"),
        ("V=int4,K=int8", "keys, then values, as in 'K=int8:g32,V=int4:g32'"),
        ("K=int8", "keys, then values"),
        ("k=int8,v=int4", "keys, then values"),
        ("K=q8_0/q4_0,V=int4", "one format, or a mix"),
        ("K=int8,V=int4,V=int2", "one format, or a mix"),
        ("there_is_no.json", "a file that `kvkit study -o` wrote"),
        (4, "a format such as 'int4:g32', or a mix of formats, got int 4"),
    ],
)
def test_what_a_mix_leaves_open_is_refused(text, words):
    with pytest.raises(KvkitError) as caught:
        mix_named(text).of_layers(4)
    assert words in str(caught.value)


def test_layers_are_not_counted_from_an_unknown_end():
    with pytest.raises(
        KvkitError, match="numbers from 0 on, because it is not known which layer is the last"
    ):
        mix_named("int8@-1/int4").of_numbers((0, 10, 20))
    assert mix_named("int8@0,5/int4").of_numbers((0, 10)) == [("int8", "int8"), ("int4", "int4")]


@pytest.mark.parametrize(
    "held", ["{", "[]", "3", "{}", '{"kvkit_mix": 3, "num_layers": 2}',
             '{"kvkit_mix": "int8", "num_layers": "2"}',
             '{"kvkit_mix": "other.json", "num_layers": null}', '{"kvkit_mix": "int8", "num_layers": true}'],
)  # fmt: skip
def test_other_files_are_no_mix(held, tmp_path):
    path = tmp_path / "mix.json"
    path.write_text(held)
    with pytest.raises(KvkitError, match="a file that `kvkit study -o` wrote"):
        mix_named(str(path))


def test_a_mix_in_a_file_is_for_its_number_of_layers(tmp_path):
    path = tmp_path / "mix.json"
    path.write_text(json.dumps({"kvkit_mix": "int8@-1/int4", "num_layers": 3}))
    assert mix_named(str(path)).of_layers(3)[2] == ("int8", "int8")
    with pytest.raises(KvkitError, match="num_layers: expected 3, as in the file of int8@-1/int4, got 4"):
        mix_named(str(path)).of_layers(4)
