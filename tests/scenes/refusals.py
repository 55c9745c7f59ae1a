"""Legal calls to be broken, and the check that a broken one is refused by name and changes nothing."""

import attention_scenes
import backends
import numpy as np
import pytest
import scenes
from scenes import INT64_MAX, MOVED, Formats

import kvkit
from kvkit import KvkitError

FLOAT = MOVED[0]
INT8 = Formats("fp16", "int8", "fp32", 8, 8, (24,))
INT4 = Formats("fp32", "int8", "fp16", 4, 8, (24,))
KINDS = ("static", "dynamic")
kinds = pytest.mark.parametrize("kind", KINDS)


def legal(kind, formats=INT8, **choices):
    """Dynamic: sequences 0 (3 past, 2 new), 1 (none), 2 (4 past), 3 (0 past, 3 new) in pages of 3."""
    rng = np.random.default_rng(3)
    if kind == "static":
        return scenes.static(rng, formats, **choices)
    lengths = [(3, 2), (0, 0), (4, 0), (0, 3)]
    scene = scenes.dynamic(rng, formats, 0, 1, lengths=lengths, dim=choices.get("dim"))
    pages = np.array([[30, 3, -1], [-1, -1, -1], [30, 12, INT64_MAX], [20, -1, INT64_MAX]])
    shape = {name: (34, *scene[name].shape[1:]) for name in ("cache", "scale") if scene[name] is not None}
    arrays = {name: np.resize(scene[name], shape[name]) for name in shape}
    order = {"seqstarts": [0, 2, 2, 2, 5], "kvstarts": [0, 5, 5, 9, 12], "start_pos": [3, 0, 4, 0]}
    steps = {name: np.array(values) for name, values in order.items()}
    return scene.but(**arrays, **steps, cachestarts=pages, max_seqlen=3, max_kvlen=5)


def legal_attention(kind, formats=attention_scenes.FP32, **options):
    """B 2, heads 4 over 2, n 3, m 5, head size 8; dynamic: (2, 3), (0, 0), (4, 1)."""
    rng = np.random.default_rng(3)
    options = {"dim": 8, **options}
    if kind.startswith("static"):
        return getattr(attention_scenes, kind)(rng, formats, 2, 3, **options)
    pages = {"page_size": 3} if kind == "dynamic_cache" else {}
    return getattr(attention_scenes, kind)(rng, formats, [(2, 3), (0, 0), (4, 1)], **pages, **options)


def refused(call, name, **more):
    """The call raises an error about `name`, or one of them; by every backend in the same words.

    It says what was expected and got, and no byte changes of what the call was given.
    """
    outputs = more.get("out", ())
    given = [*call.inputs.values(), *(outputs if isinstance(outputs, (tuple, list)) else [outputs])]
    given = [array for array in given if isinstance(array, np.ndarray)]
    before = [array.tobytes() for array in given]
    with pytest.raises(KvkitError) as error:
        call.run(**more)
    message = str(error.value)
    assert message.startswith(name), message
    assert ": expected " in message
    assert ", got " in message
    assert [array.tobytes() for array in given] == before
    if backends.name != "cpu":
        with pytest.raises(KvkitError) as error:
            call.run(kvkit, **more)
        assert message == str(error.value)
    return message


TENSORS = ("current_key", "current_value", "cache", "scale")


class Tensor:
    """What a tensor of another library looks like."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.ndim = array, array.shape, array.dtype, array.ndim

    def numpy(self):
        return self.array


def swapped(array):
    return array.astype(array.dtype.newbyteorder())


NO_ARRAYS = {
    "list": lambda array: array.tolist(),
    "none": lambda array: None,
    "number": lambda array: 1,
    "other_library": Tensor,
    "bytes": lambda array: array.tobytes(),
}
