"""Sessions and states of llama.cpp: all that is in them comes out, and what is no such file is refused."""

import itertools
import tracemalloc

import llama_state
import numpy as np
import pytest

from kvkit import files
from kvkit.files import FileError

F32, F16, Q4_0, Q8_0, BF16 = 0, 1, 2, 8, 30
BYTES = {F32: 4 * 6, F16: 2 * 6, BF16: 2 * 6, Q8_0: 2 * 34, Q4_0: 2 * 18}  # of a row of 6, or of 64, elements
NAMES = {F32: "float32", F16: "float16", BF16: "bfloat16", Q8_0: "q8_0", Q4_0: "q4_0"}
VERSIONS = {True: (9, 10), False: (2, 3)}


def random_memory(rng, streams, keys, values, layers=3, extra=0, several=False):
    made = []
    for count in streams:
        cells = []
        for _ in range(count):
            ids = sorted(rng.choice(9, rng.integers(1, 4) if several else 1, False).tolist())
            cells.append((int(rng.integers(1000)), ids, rng.integers(-5, 99, extra).tolist()))

        def rows(kind, count=count):
            return None if kind is None else (kind, [rng.bytes(BYTES[kind]) for _ in range(count)])

        made.append((cells, [(rows(keys), rows(values)) for _ in range(layers)]))
    return made


def assert_stream(found, begin, cells_name, stream, v_trans, fields):
    cells, layers = stream
    arrays = found.arrays
    assert arrays[f"{cells_name}.positions"].tolist() == [cell[0] for cell in cells]
    starts = arrays[f"{cells_name}.sequence_starts"]
    ids = arrays[f"{cells_name}.sequences"]
    assert [ids[a:b].tolist() for a, b in itertools.pairwise(starts)] == [cell[1] for cell in cells]
    for i, field in enumerate(fields):
        assert arrays[f"{cells_name}.{field}"].tolist() == [cell[2][i] for cell in cells]
    for layer, pair in enumerate(layers):
        for kv, part in enumerate(pair):
            if part is None:
                assert f"{begin}.{layer}.{kv}" not in arrays
                continue
            kind, rows = part
            array = arrays[f"{begin}.{layer}.{kv}" if pair[1] else f"{begin}.{layer}"]
            array = array if array.ndim == 2 else array[0]
            array = array.T if kv and v_trans else array
            assert array.dtype.name == (NAMES[kind] if kind in (F32, F16, BF16) else "uint8")
            assert [np.ascontiguousarray(row).tobytes() for row in array] == rows


@pytest.mark.parametrize("session", [True, False], ids=["session", "sequence"])
@pytest.mark.parametrize("v_trans", [0, 1])
@pytest.mark.parametrize("kinds", [(F16, F16), (F32, BF16), (Q8_0, F16), (Q8_0, Q4_0), (F16, None)], ids=str)
@pytest.mark.parametrize("streams", [(5,), (4, 0, 7)], ids=str)
def test_all_comes_out(tmp_path, rng, session, v_trans, kinds, streams):
    v_trans = v_trans and kinds[1] in (F16, BF16)
    old, new = VERSIONS[session]
    for version, fields, several in (
        (old, (), True),
        (old, ("x", "y"), False),
        (new, ("x", "y", "token"), True),
    ):
        made = random_memory(rng, streams, *kinds, extra=len(fields), several=several)
        data = llama_state.head(session, version, [1, 5, 9])
        if session:
            data += llama_state.session_part("llama", [0, 2], [0.5, 1.5], [])
        path = tmp_path / "state.bin"
        path.write_bytes(data + llama_state.memory(made, int(v_trans), bool(fields)))
        found = files.read(path)
        assert found.kind == ("session of llama.cpp" if session else "state of a sequence of llama.cpp")
        assert found.arrays["token_ids"].tolist() == [1, 5, 9]
        assert found.metadata["version"] == version
        if session:
            assert found.metadata["architecture"] == "llama"
            assert found.arrays["logits"].tolist() == [0.5, 1.5]
        for i, stream in enumerate(made):
            if stream[0]:
                names = (f"cache.{i}", f"cache_cells.{i}") if len(streams) > 1 else ("cache", "cache_cells")
                assert_stream(found, *names, stream, v_trans, fields)
        assert any("Hadamard" in note for note in found.notes) == bool({Q8_0, Q4_0} & set(kinds))
        assert found.description.rope_applied
        line = found.description.layout
        assert (" ; " in line, " kv" in line) == (bool(v_trans), kinds[1] is not None)


@pytest.mark.parametrize(
    ("session", "version"), [(True, 11), (False, 4), (True, 8), (False, 1), (False, 2**31)]
)
def test_unknown_versions_are_refused(tmp_path, session, version):
    (tmp_path / "state").write_bytes(llama_state.head(session, version, []) + bytes(100))
    with pytest.raises(FileError, match=f"of version {version}, but kvkit knows .* and .*: save it with"):
        files.read(tmp_path / "state")


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_damaged_states_are_read_or_refused(tmp_path, rng, count):
    """Cut, with numbers that are wrong or huge: a line, no crash, no memory."""
    path, wholes = tmp_path / "state", []
    for session, extra in ((True, 0), (False, 2)):
        made = random_memory(rng, (4, 3), Q8_0, F16, extra=extra)
        data = llama_state.head(session, VERSIONS[session][0], [1, 2])
        data += llama_state.session_part("a", [1], [1.0], [2.0]) if session else b""
        wholes.append(data + llama_state.memory(made, session, bool(extra)))
    errors = []
    for i in range(count):
        data = bytearray(wholes[i % 2])
        for _ in range(rng.integers(1, 3)):
            at = int(rng.integers(8, len(data) - 8))
            if rng.integers(3):
                value = int(rng.choice([0, 1, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1]))
                data[at : at + 4] = value.to_bytes(4, "little")
            else:
                del data[at : at + int(rng.integers(1, 60))]
        path.write_bytes(data)
        try:
            files.read(path)
        except FileError as error:
            errors.append(str(error))
    assert count // 4 < len(errors) < count
    assert all(error.startswith(f"{path}: ") and error.isprintable() for error in errors)


def test_a_state_of_empty_layers(tmp_path):
    """It is refused before there is an array for each."""
    count = 650_000
    text = llama_state.head(False, 2, [1]) + llama_state.u32(1) + llama_state.u32(1)
    text += llama_state.i32(0) + llama_state.u32(1) + llama_state.i32(0) + llama_state.u32(0)
    text += llama_state.u32(count) + (llama_state.i32(F16) + llama_state.u64(0)) * (2 * count)
    path = tmp_path / "state.bin"
    path.write_bytes(text)
    tracemalloc.start()
    with pytest.raises(FileError, match="damaged, or with a kind of memory that kvkit cannot read"):
        files.read(path)
    assert tracemalloc.get_traced_memory()[1] < 3 * len(text)  # the file is copied
    tracemalloc.stop()


def test_cells_of_two_sequences_and_layers_of_several_types(tmp_path, rng):
    """Position 0 and sequence 0 are legal; numbers below 0 and an unknown flag are refused."""

    def read(cells, kinds=((F16, F16),), flag=0):
        layers = [[(kind, [rng.bytes(BYTES[kind]) for _ in cells]) for kind in pair] for pair in kinds]
        (tmp_path / "state").write_bytes(
            llama_state.head(False, 2, [1]) + llama_state.memory([(cells, layers)], flag)
        )
        return files.read(tmp_path / "state")

    found = read([(0, [0, 1]), (1, [0, 1])], [(F16, F16), (F32, F16)])
    assert found.arrays["cache_cells.sequences"].tolist() == [0, 1, 0, 1]
    assert (found.description.format, found.description.sizes) == (None, {"l": 2, "b": 1, "n": 2})
    assert read([(0, [0])], [(Q8_0, Q4_0)]).description.format == "q8_0/q4_0"
    for position, sequence, flag in ((-1, 0, 0), (0, -1, 0), (0, 0, 2)):
        with pytest.raises(FileError, match="damaged, or with a kind of memory"):
            read([(position, [sequence])], flag=flag)
