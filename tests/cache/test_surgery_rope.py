"""Rotary embeddings as descriptions: a shifted key is the key at its new position, whatever the scaling."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvkit import KvkitError, Rope

KEY = np.array([[1.0, 2, 3, 4]])
LONG = {"short_factor": np.linspace(1, 2, 64), "long_factor": np.linspace(1, 60, 64)}
SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 4},
    "llama3": {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 8192},
    "yarn": {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 4096},
    "yarn, own factor": {
        "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 512, "mscale": 0.7,
        "mscale_all_dim": 1.0, "truncate": False,
    },
    "longrope, long": {"rope_type": "longrope", "attention_factor": 1.19, "long": True} | LONG,
    "longrope, short": {
        "rope_type": "longrope", "long": False, "original_max_position_embeddings": 4096, "factor": 32,
    } | LONG,
}  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [128, 64])
@pytest.mark.parametrize("name", SCALINGS)
def test_a_shifted_key_is_the_key_at_its_new_position(name, dim, interleaved):
    if dim == 64 and "longrope" in name:
        dim = 128  # whose lists are of 64 pairs
    rope = Rope(dim, 5e5, interleaved, SCALINGS[name])
    keys = np.random.default_rng(0).standard_normal((2, 5, 128))
    at, delta = np.array([0, 1, 77, 4000, 131071]), np.array([5, -1, -70, 17, -131071])
    moved, there = rope.shift(rope.rotate(keys, at), delta), rope.rotate(keys, at + delta)
    assert np.linalg.norm(moved - there) <= 1e-9 * np.linalg.norm(there)
    assert (moved[..., dim:] == keys[..., dim:]).all()


@pytest.mark.parametrize(
    ("rope", "at_three", "at_one"),
    [
        (Rope(4), [-1.413353, 1.879118, -2.828857, 4.058191], [-1.984111, 1.959901, 2.462378, 4.0198]),
        (
            Rope(4, interleaved=True),
            [-1.272233, -1.838865, 2.878668, 4.088187],
            [-1.14264, 1.922076, 2.959851, 4.0298],
        ),
        (Rope(2), None, [-1.14264, 1.922076, 3, 4]),
    ],
)
def test_vectors(rope, at_three, at_one):
    rotated = rope.rotate(KEY, 3)
    if at_three is not None:
        np.testing.assert_allclose(rotated[0], at_three, atol=5e-7)
    np.testing.assert_allclose(rope.shift(rotated, -2)[0], at_one, atol=5e-7)


def test_ropes_are_equal_if_they_rotate_alike():
    """A mapping may change after the call, and hold arrays."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    one = Rope(8, scaling=scaling)
    scaling["factor"] = 8.0
    other = Rope(8, scaling=scaling)
    assert one != other
    assert one.scaling == {"rope_type": "linear", "factor": 2.0}
    long = {"rope_type": "longrope", "long_factor": np.array([1.0, 4.0]), "short_factor": np.ones(2),
            "factor": 2.0, "original_max_position_embeddings": 64, "long": True}  # fmt: skip
    assert len({Rope(4, scaling=long), Rope(4, scaling=dict(long)), Rope(4)}) == 2


def test_the_scalings_are_those_of_the_formulas():
    inverse = 5e5 ** (-np.arange(0, 128, 2) / 128)
    llama3 = Rope(128, 5e5, scaling=SCALINGS["llama3"]).frequencies
    wave = 2 * np.pi / inverse
    assert (llama3[wave < 2048] == inverse[wave < 2048]).all()
    assert (llama3[wave > 8192] == inverse[wave > 8192] / 8).all()
    middle = (wave >= 2048) & (wave <= 8192)
    assert middle.any()
    assert ((llama3 < inverse) & (llama3 > inverse / 8))[middle].all()
    yarn = Rope(128, 1.5e5, scaling=SCALINGS["yarn"])
    assert yarn.attention_factor == pytest.approx(0.1 * np.log(32) + 1)
    inverse = 1.5e5 ** (-np.arange(0, 128, 2) / 128)
    # c(32) = 64 ln(4096 / 64 pi) / ln theta = 16.2 and c(1) = 34.8
    np.testing.assert_allclose(yarn.frequencies[:17], inverse[:17])
    np.testing.assert_allclose(yarn.frequencies[35:], inverse[35:] / 32)
    np.testing.assert_allclose(yarn.frequencies[25], inverse[25] * (9 / 19 / 32 + 10 / 19))
    norm = np.linalg.norm
    keys = np.random.default_rng(0).standard_normal((3, 128))
    moved_again = yarn.rotate(yarn.rotate(keys, 9), -2)  # what a shift must not do: the factor once more
    assert norm(moved_again) / norm(yarn.rotate(keys, 7)) == pytest.approx(1.3466, abs=1e-4)


def config(**options):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    return SimpleNamespace(**sizes | options)


@pytest.mark.parametrize(
    ("given", "options", "ropes"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, {}, [(16, 1e5), (16, 1e5)]),
        ({"rope_theta": 7e3, "partial_rotary_factor": 0.5, "head_dim": 32}, {}, [(16, 7e3), (16, 7e3)]),
        ({"no_rope_layers": [1, 0]}, {}, [(16, 1e4), "none"]),
        (
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            {},
            [(16, 1e6), (16, 1e4)],
        ),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            {"text_only": True},
            [(16, 1e4), (16, 1e4)],
        ),
    ],
)
def test_a_config_says_how_each_layer_rotates(given, options, ropes):
    found = Rope.from_config(config(**given), **options)
    assert [rope if rope == "none" else (rope.rotary_dim, rope.theta) for rope in found] == ropes


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "rope_theta": 1e4, "sliding_window": 8}
JOINED = {"n_layer": 2, "n_head": 4, "n_embd": 64, "num_hidden_layers": None, "hidden_size": None}


@pytest.mark.parametrize(
    ("given", "ropes"),
    [
        ({"model_type": "cohere2"} | WINDOWS, [Rope(16, interleaved=True), "none"]),
        ({"model_type": "exaone4"} | WINDOWS, [Rope(16), "none"]),
        ({"model_type": "exaone4"} | WINDOWS | {"sliding_window": None}, [Rope(16)] * 2),
        ({"model_type": "mistral"} | WINDOWS, [Rope(16)] * 2),
        ({"model_type": "cohere", "rope_theta": 1e4}, [Rope(16, interleaved=True)] * 2),
        ({"model_type": "gptj", "rotary_dim": 8} | JOINED, [Rope(8, interleaved=True)] * 2),
        ({"model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 7e3}, [Rope(4, 7e3)] * 2),
        ({"model_type": "bloom"} | JOINED, ["none"] * 2),
        ({"model_type": "falcon", "alibi": True}, ["none"] * 2),
        ({"model_type": "falcon"}, [Rope(16)] * 2),
    ],
)
def test_the_type_of_a_model_says_what_its_config_does_not(given, ropes):
    assert Rope.from_config(config(**given)) == ropes


LISTS = {"rope_type": "longrope", "long": True, "long_factor": [1.0] * 4}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 16}


def configured(**options):
    return lambda: Rope.from_config(config(**options))


REFUSED = [
    *((text, lambda scaling=scaling: Rope(128, scaling=scaling)) for text, scaling in (
        ("from the length of each call", {"rope_type": "dynamic", "factor": 2}),
        ("one position for each token", {"rope_type": "default", "mrope_section": [8, 12, 12]}),
        ("long=True or long=False", {"rope_type": "longrope", **LONG}),
        ("64 positive numbers", {"rope_type": "longrope", "long": True, "long_factor": [1]}),
        ("a number factor", {"rope_type": "linear"}),
        ("a rope_type of", {"rope_type": "ntk"}),
        ("a mapping", 3))),
    *(("expected", lambda scaling=scaling: Rope(8, scaling=scaling)) for scaling in (
        {"rope_type": ["x"]}, LISTS | {"long_factor": ["a", "b"]},
        LISTS | {"original_max_position_embeddings": 1, "factor": 2},
        LISTS | {"original_max_position_embeddings": 16, "factor": "a"},
        YARN | {"factor": 2, "mscale": "a", "mscale_all_dim": 1},
        YARN | {"max_position_embeddings": "a"})),
    *(("expected", lambda options=options: Rope(**options)) for options in (
        {"rotary_dim": 3}, {"rotary_dim": 4, "theta": 1.0}, {"rotary_dim": 0})),
    ("states: expected an array of floats, got", lambda: Rope(8).rotate(np.full((1, 8), 10), [1])),
    (r"positions: expected one for each token of states, \(3,\), or one for all",
     lambda: Rope(8).rotate(np.ones((3, 8)), [1, 2])),
    ("states: expected heads of 8 elements or more", lambda: Rope(8).rotate(np.ones((3, 4)), [1, 2, 3])),
    *(("positions: expected integers", call) for wrong in (None, float("nan"), 1.5, "abc", [[1], [1, 2]])
      for call in (lambda at=wrong: Rope(8).rotate(np.ones((2, 8)), at),
                   lambda at=wrong: Rope(8).angles(at))),
    ("config: expected .* got model_type 'gpt2' without rope_parameters",
     configured(model_type="gpt2", **JOINED)),
    ("'nanochat', which kvkit cannot read", configured(model_type="nanochat", rope_theta=1e4)),
    ("sliding_window: expected the window of a model", configured(model_type="exaone4", rope_theta=1e4)),
    ("layer_types: expected 2 members, one for each layer, got 1",
     configured(layer_types=["full_attention"])),
    ("num_hidden_layers: expected a whole number", configured(num_hidden_layers=None)),
    ("rope_scaling: expected a mapping", configured(rope_scaling=3)),
    ("rope_theta: expected 20000.0, as", configured(rope_theta=1e4, rope_parameters={"rope_theta": 2e4})),
    ("rope_local_base_freq: expected an entry that is",
     configured(rope_theta=1e4, rope_local_base_freq=1e4)),
    ("rope_kind: expected an entry that kvkit knows", configured(rope_theta=1e4, rope_kind=3)),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "call"), REFUSED)
def test_refused(sentence, call):
    with pytest.raises(KvkitError, match=sentence):
        call()


def test_a_config_of_longrope_needs_the_list():
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    given = config(
        rope_scaling={"rope_type": "longrope", **factors},
        original_max_position_embeddings=4096,
        max_position_embeddings=131072,
    )
    with pytest.raises(KvkitError, match="long=True or long=False"):
        Rope.from_config(given)
    rope = Rope.from_config(given, long=True)[1]
    assert (rope.frequencies == Rope(16).frequencies / 2).all()
    assert rope.attention_factor == pytest.approx((1 + np.log(32) / np.log(4096)) ** 0.5)
