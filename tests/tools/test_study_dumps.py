"""A stranger's dump, whatever its names, types and axes: studied, or refused with the line that works."""

import json
import shlex

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from kvkit import files, tools
from kvkit_cli.main import main

pytestmark = pytest.mark.cpu

LAYERS, TOKENS, HEADS, QUERY_HEADS, DIM, LAST = 2, 96, 2, 8, 32, 16


@pytest.fixture(scope="module")
def sides():
    """Return keys, values and queries [layers, tokens, heads, dim] of two key heads and eight query heads."""
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, LAYERS, TOKENS, HEADS, DIM)).astype(ml_dtypes.bfloat16)
    queries = rng.standard_normal((LAYERS, LAST, QUERY_HEADS, DIM)).astype(ml_dtypes.bfloat16)
    return keys, values, queries


def by_layer(sides, *patterns, form=np.asarray):
    """Return arrays of layers under patterns with {} for the number of a layer."""
    return {
        name.format(i): np.ascontiguousarray(form(side[i]))
        for side, name in zip(sides, patterns, strict=True)
        for i in range(LAYERS)
    }


def heads_first(x):
    return x.swapaxes(0, 1)


def named(sides, form):
    """Return keys, values and queries under their usual names."""
    return {name: form(side) for name, side in zip(("key", "value", "query"), sides, strict=True)}


DUMPS = {  # name: (the arrays of a file, what the error says to give; None if nothing is to be given)
    "plain": (lambda k, v, q: {"key": k, "value": v, "query": q[:, None]}, None),
    "float64": (lambda *s: named(s, lambda x: x.astype(np.float64)), None),
    "big endian": (
        lambda k, v, q: {"key": k.astype(">f4"), "value": v.astype(">f2"), "query": q.astype(">f8")},
        None,
    ),
    "bits": (
        lambda *s: by_layer(s, "keys_{}", "values_{}", "queries_{}", form=lambda x: x.view(np.uint16)),
        "--keys 'keys_{l}' --values 'values_{l}'",
    ),
    "signed bits": (
        lambda *s: named(s, lambda x: x.view(np.int16)), None,
    ),
    "transformers": (
        lambda *s: by_layer(
            s, *(f"past_key_values.{{}}.{side}" for side in ("key", "value", "query")),
            form=lambda x: heads_first(x)[None],
        ),
        None,
    ),
    "heads first, no batch": (
        lambda *s: by_layer(
            s, *(f"past_key_values.{{}}.{side}" for side in ("key", "value", "query")), form=heads_first
        ),
        None,
    ),
    "slashes": (
        lambda *s: by_layer(s, "layer_{}/K", "layer_{}/V", "layer_{}/Q"),
        "--keys 'layer_{l}/K' --values 'layer_{l}/V'",
    ),
    "rows": (
        lambda *s: by_layer(
            s, "k_proj_out.{}", "v_proj_out.{}", "q_proj_out.{}", form=lambda x: x.reshape(len(x), -1)
        ),
        "--keys 'k_proj_out.{l}' --values 'v_proj_out.{l}' --layout 'l | n (h c)' --sizes h=2",
    ),
    "stacked": (
        lambda k, v, q: {"K": k, "V": v, "Q": q},
        "--keys K --values V --layout '| l n h c'",
    ),
    "heads last": (
        lambda *s: named(s, lambda x: np.ascontiguousarray(x.swapaxes(2, 3))),
        "--layout '| l n c h'",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def mix_of_plain(sides, tmp_path_factory):
    """Return the mix of a dump with the usual names."""
    plain = tmp_path_factory.mktemp("dumps") / "plain.npz"
    files.write(plain, DUMPS["plain"][0](*sides))
    return json.loads(CliRunner().invoke(main, ["study", str(plain), "--bits", "5", "--json"]).stdout)["mix"]


def numbers(found):
    """Return what was measured."""
    return [vars(one) for one in found.summary], found.rows


@pytest.mark.parametrize(
    ("ending", "kind"),
    [*(("npz", kind) for kind in DUMPS), *(("safetensors", kind) for kind in ("plain", "bits", "slashes"))],
)
def test_a_strangers_dump(tmp_path, sides, mix_of_plain, ending, kind):
    """The mix with its error on held-back tokens, and the figure, with the command that the error names."""
    arrange, given = DUMPS[kind]
    arrays = arrange(*sides)
    path, report = tmp_path / f"dump.{ending}", tmp_path / "report"
    files.write(path, arrays)
    command = ["study", str(path), "--bits", "5", "--json"]
    if given is not None:
        refused, options = CliRunner().invoke(main, command), shlex.split(given)
        assert refused.exit_code == 2
        for option in options[:4] if len(options) > 2 else options:
            assert option in refused.stderr
        command += options
    shown = CliRunner().invoke(
        main, [*command, *(("-o", str(report)) if (ending, kind) == ("npz", "plain") else ())]
    )
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)["mix"]
    assert found["text"] == mix_of_plain["text"]
    assert found["error_measured"] == pytest.approx(mix_of_plain["error_measured"], rel=5e-3)
    assert (report / "mix.json").exists() == ((ending, kind) == ("npz", "plain"))


def test_the_next_error_names_what_is_still_missing(tmp_path, sides):
    """Rows of all heads need a layout and the number of heads; queries of other names need theirs."""
    rows = tmp_path / "rows.npz"
    files.write(rows, DUMPS["rows"][0](*sides))
    shown = CliRunner().invoke(
        main, ["study", str(rows), "--keys", "k_proj_out.{l}", "--values", "v_proj_out.{l}"]
    )
    assert "--layout 'l | n (h c)' and --sizes h=N" in shown.stderr
    keys, values, queries = sides
    other = tmp_path / "other.npz"
    files.write(other, {"key": keys, "value": values} | {f"states{i}": x for i, x in enumerate(queries)})
    shown = CliRunner().invoke(main, ["study", str(other), "--bits", "5"])
    assert "--queries 'q_{l}'" in shown.stderr
    shown = CliRunner().invoke(main, ["study", str(other), "--bits", "5", "--queries", "states{l}"])
    assert shown.exit_code == 0, shown.output
    wrong = CliRunner().invoke(main, ["study", str(other), "--bits", "5", "--queries", "state{l}"])
    assert "names like it: states0" in wrong.stderr


def test_strides_and_wide_floats(sides):
    """Arrays with any strides, and float64, give what plain ones give."""
    keys, values, queries = (x.astype(np.float32) for x in sides)
    expected = numbers(tools.study({"key": keys, "value": values, "query": queries}, "int4:g32,kivi4"))
    spread = np.zeros((LAYERS, TOKENS, 2 * HEADS, DIM), np.float64)
    spread[:, :, ::2] = keys
    turned = np.asfortranarray(values)[:, ::-1].copy()[:, ::-1]
    found = tools.study(
        {"key": spread[:, :, ::2], "value": turned, "query": queries.astype(np.float64)}, "int4:g32,kivi4"
    )
    assert numbers(found) == expected
    assert "float64 is read as float32" in found.notes
