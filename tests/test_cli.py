"""The command line: what it answers and how fast, what it writes, how it fails."""

import json
import os
import shlex
import subprocess
import sys
import time

import click
import numpy as np
import pytest
import scenes

import kvkit
from kvkit.operators import OPERATORS
from kvkit_cli import npz
from kvkit_cli.main import VERBS, main

NAMES = {"static": "key_value_cache", "dynamic": "dynamic_batching.key_value_cache"}
LAZY = ("numba", "numpy", "rich", "kvkit", "ml_dtypes", "llvmlite")


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command in this process; gives its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*args):
        with pytest.raises(SystemExit) as caught:
            main([str(arg) for arg in args], prog_name="kvkit")
        return caught.value.code or 0, *capsys.readouterr()

    return call


def process(*args, **more):
    command = [sys.executable, "-m", "kvkit_cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


def scene(kind, formats=scenes.MOVED[0], **more):
    return getattr(scenes, kind)(np.random.default_rng(0), formats, **more)


def arrays_of(scene):
    return {name: np.asarray(value) for name, value in scene.inputs.items() if value is not None}


def settings(attrs):
    return [word for name, value in attrs.items() for word in ("--set", f"{name}={value}")]


def assert_results(path, scene):
    """A file holds what the reference makes of a scene, and no more."""
    got = npz.read(path).arrays
    expected = dict(zip(("key", "value", "cache", "scale"), scene.oracle(), strict=True))
    assert sorted(got) == sorted(name for name, array in expected.items() if array is not None)
    for name, array in got.items():
        assert array.dtype == expected[name].dtype
        scenes.assert_same(array, expected[name], name)


@pytest.fixture
def files(tmp_path):
    """(IN, OUT): a small static call, with its attributes in the file, and a name for results."""
    call = scene("static", dim=6)
    npz.write(tmp_path / "in.npz", {**arrays_of(call), **{k: np.array(v) for k, v in call.attrs.items()}})
    return tmp_path / "in.npz", tmp_path / "out.npz"


# Answers without work


def loaded(*args):
    """Which of the slow modules a command has loaded when it ends."""
    code = f"""
import json, sys
from kvkit_cli.main import main
try:
    main({list(args)}, prog_name="kvkit")
finally:
    print(json.dumps([name for name in {LAZY} if name in sys.modules]), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["--version"], []], ids=str)
def test_help_loads_nothing(args):
    assert loaded(*args) == []


@pytest.mark.parametrize("args", [["ops"], ["describe", "key_value_cache"], ["run", "--help"]], ids=str)
def test_tables_load_no_numba(args):
    assert not {"numba", "llvmlite"} & set(loaded(*args))


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_is_immediate(option):
    seconds = []
    for _ in range(7):
        begin = time.perf_counter()
        assert process(option).returncode == 0
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.3


def test_version():
    done = process("--version")
    assert (done.stdout, done.stderr) == (f"kvkit {kvkit.__version__}\n", "")


def test_help_lists_every_verb(run):
    for args in ([], ["--help"]):
        code, out, err = run(*args)
        assert (code, err) == (0, "")
        for verb, (_, line) in VERBS.items():
            assert f"  {verb} " in out
            assert line.split()[0] in out


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_begins_with_its_line(run, verb):
    code, out, err = run(verb, "--help")
    assert (code, err) == (0, "")
    assert out.split("\n\n")[1].strip() == VERBS[verb][1]
    assert isinstance(main.get_command(click.Context(main), verb), click.Command)


# Tables


def assert_plain(text):
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


def words(text):
    """A text without the folding and the padding of tables."""
    return "".join(text.split())


def test_ops(run):
    code, out, err = run("ops")
    assert (code, err) == (0, "")
    assert_plain(out)
    assert all(op.name in out and words(op.source) in words(out) for op in OPERATORS.values())


@pytest.mark.parametrize("op", OPERATORS.values(), ids=list(OPERATORS))
def test_describe(run, op):
    code, out, err = run("describe", op.name)
    assert (code, err) == (0, "")
    assert_plain(out)
    for thing in (*op.inputs, *op.attributes, *op.outputs):
        assert f"\n {thing.name} " in out
    for attribute in op.attributes:
        assert f" {attribute.name} {attribute.default} " in " ".join(out.split())
    assert "in-out" in out
    assert "optional" in out


def test_the_described_example_runs(run, files):
    example = run("describe", "key_value_cache")[1].splitlines()[-1]
    source, output = files
    arrays = npz.read(source).arrays
    del arrays["start_pos"], arrays["num_layer"], arrays["layer_idx"]
    arrays["cache"] = arrays["cache"][:, :1]
    npz.write(source, arrays)
    program, *args = shlex.split(example)
    assert program == "kvkit"
    names = {"IN.npz": source, "OUT.npz": output}
    assert run(*(names.get(arg, arg) for arg in args))[0] == 0
    assert npz.read(output).arrays["key"].shape[1] == arrays["current_key"].shape[1]


def test_info(run):
    code, out, err = run("info")
    assert (code, err) == (0, "")
    assert_plain(out)
    for fact in (
        kvkit.__version__,
        np.__version__,
        "numba",
        "threading layer",
        "compile cache",
        "backend cuda",
    ):
        assert fact in out
    assert "not available" in out


def test_info_without_a_compile_cache():
    done = process("info", env={**os.environ, "KVKIT_CACHE_DIR": ""})
    assert done.returncode == 0
    assert "compile cache off" in " ".join(done.stdout.split())


# Runs

FORMATS = [
    scenes.Formats("fp32", "fp32"),
    scenes.Formats("bf16", "bf16"),
    scenes.Formats("int8", "int8"),
    scenes.Formats("bf16", "int8", "bf16", 8, 8, (24,)),
    scenes.Formats("fp16", "int8", "fp32", 4, 8, (24,)),
]
WRITERS = {
    "kvkit": npz.write,
    "savez": lambda path, arrays: np.savez(path, **arrays),
    "compressed": lambda path, arrays: np.savez_compressed(path, **arrays),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_run_makes_what_the_reference_makes(run, tmp_path, kind, formats, writer):
    call = scene(kind, formats, repeat=2)
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    WRITERS[writer](source, arrays_of(call))
    before = source.read_bytes()
    code, _, err = run("run", NAMES[kind], source, "-o", output, *settings(call.attrs))
    assert (code, err) == (0, "")
    assert_results(output, call)
    assert source.read_bytes() == before
    metadata = npz.read(output).metadata
    assert metadata["operator"] == NAMES[kind]
    assert metadata["attributes"] == call.attrs


def test_run_in_a_process(files):
    source, output = files
    done = process("run", "key_value_cache", source, "-o", output)
    assert (done.returncode, done.stderr) == (0, "")
    assert_results(output, scene("static", dim=6))


def test_the_report(run, files):
    source, output = files
    code, out, _ = run("run", "key_value_cache", source, "-o", output)
    assert code == 0
    assert_plain(out)
    lines = [line.split() for line in out.splitlines()]
    assert ["current_key", "in", "float32", "(2,", "2,", "2,", "6)", "192", "B"] in lines
    assert ["cache", "in-out", "float32", "(4,", "3,", "2,", "7,", "2,", "6)", "7.9", "KiB"] in lines
    assert ["value", "out", "float32", "(2,", "5,", "2,", "6)", "480", "B"] in lines
    assert not any("scale" in line for line in lines)
    assert out.splitlines()[-1].startswith("key_value_cache on cpu: ")
    assert out.endswith(" s (includes compiling or loading the kernels)\n")


def test_quiet(run, files):
    assert run("run", "key_value_cache", files[0], "-o", files[1], "--quiet") == (0, "", "")


def test_optional_inputs_may_be_absent(run, tmp_path):
    call = scene("dynamic", dim=6)
    arrays = arrays_of(call)
    del arrays["max_seqlen"], arrays["max_kvlen"]
    npz.write(tmp_path / "in.npz", arrays)
    args = ("run", NAMES["dynamic"], tmp_path / "in.npz", "-o", tmp_path / "out.npz", *settings(call.attrs))
    assert run(*args)[0] == 0
    assert_results(tmp_path / "out.npz", call)
    code, _, err = run(*args, "--set", "max_kvlen=1")
    assert code == 2
    assert "max_kvlen" in err


def test_attributes_and_numbers_come_from_the_file(run, files):
    assert run("run", "key_value_cache", files[0], "-o", files[1])[0] == 0
    assert_results(files[1], scene("static", dim=6))


def test_settings_win_over_the_file(run, files):
    changes = ["--set", "layer_idx=0", "--set", "num_repeat=3", "--set", "start_pos=1"]
    assert run("run", "key_value_cache", files[0], "-o", files[1], *changes)[0] == 0
    assert_results(files[1], scene("static", dim=6).but(layer_idx=0, num_repeat=3, start_pos=1))
    assert npz.read(files[1]).metadata["attributes"]["num_repeat"] == 3


def test_threads(run, files):
    import numba

    most, before = numba.config.NUMBA_NUM_THREADS, numba.get_num_threads()
    try:
        assert run("run", "key_value_cache", files[0], "-o", files[1], "--threads", 1)[0] == 0
        assert numba.get_num_threads() == 1
    finally:
        numba.set_num_threads(before)
    for count in (0, most + 1):
        code, _, err = run("run", "key_value_cache", files[0], "-o", files[1], "--threads", count)
        assert (code, err) == (2, f"kvkit: --threads {count}: expected 1 to {most}\n")


# In place


@pytest.mark.parametrize("both", [True, False], ids=["and -o", "alone"])
@pytest.mark.parametrize("formats", FORMATS[1::2], ids=str)
def test_in_place(run, tmp_path, formats, both):
    call = scene("dynamic", formats)
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    arrays = arrays_of(call)
    npz.write(source, arrays, {"note": "kept", "producer": "me"})
    target = ["-o", output] if both else []
    assert run("run", NAMES["dynamic"], source, "--in-place", *target, *settings(call.attrs))[0] == 0
    _, _, cache, scale = call.oracle()
    after = npz.read(source)
    assert list(after.arrays) == list(arrays)
    for name, array in (arrays | {"cache": cache} | ({} if scale is None else {"scale": scale})).items():
        scenes.assert_same(after.arrays[name], array, name)
    assert (after.metadata["note"], after.metadata["producer"]) == ("kept", "me")
    if both:
        assert_results(output, call)
    assert sorted(path.name for path in tmp_path.iterdir()) == (["in.npz", "out.npz"] if both else ["in.npz"])


def test_in_place_keeps_the_number_in_the_file(run, files):
    assert run("run", "key_value_cache", files[0], "--in-place", "--set", "start_pos=1")[0] == 0
    assert npz.read(files[0]).arrays["start_pos"] == 3
    expected = scene("static", dim=6).but(start_pos=1).oracle()[2]
    scenes.assert_same(npz.read(files[0]).arrays["cache"], expected)


# Failures: a code and a line


def assert_fails(result, code, *texts):
    assert result[:2] == (code, "")
    assert result[2].startswith("kvkit: ")
    assert result[2].count("\n") == 1
    assert result[2].endswith("\n")
    for text in texts:
        assert text in result[2]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["rnu"], "no verb 'rnu' (did you mean run?) (see kvkit --help)"),
        (["--nothing"], "--nothing"),
        (["run"], "(see kvkit run --help)"),
        (
            ["run", "key_value_cach", "IN", "-o", "OUT"],
            "(did you mean key_value_cache?); there are key_value_cache",
        ),
        (["describe", "nothing"], "no operator 'nothing'; there are key_value_cache, dynamic_batching"),
        (["run", "key_value_cache", "IN"], "nothing to write: give -o OUT.npz, --in-place or both"),
        (["run", "key_value_cache", "IN", "-o", "IN"], "-o names the input"),
        (["run", "key_value_cache", "IN", "-o", "OUT", "--backend", "tpu"], "'tpu'"),
        (["run", "key_value_cache", "IN", "-o", "OUT", "--threads", "many"], "many"),
        (["run", "key_value_cache", "IN", "-o", "no/OUT"], "there is no folder"),
        (["run", "key_value_cache", "absent.npz", "-o", "OUT"], "absent.npz: no such file"),
        (["run", "key_value_cache", "absent.npz", "--in-place"], "absent.npz: no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_commands(run, files, args, text):
    names = {"IN": files[0], "OUT": files[1], "no/OUT": files[1].parent / "no" / "out.npz"}
    assert_fails(run(*(names.get(arg, arg) for arg in args)), 2, text)
    assert not files[1].exists()


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("num_layers=1", "no such name (did you mean num_layer?); there are start_pos, num_layer"),
        ("cache=1", "no such name; there are start_pos"),
        ("num_layer", "expected num_layer=NUMBER"),
        ("num_layer=", "expected num_layer=NUMBER"),
        ("num_layer=a", "expected num_layer=NUMBER"),
        ("num_layer=1.0", "num_layer=1.0: expected int"),
        ("num_layer=True", "num_layer=True: expected int"),
        ("num_layer=[1]", "num_layer=[1]: expected int"),
        ("num_layer=0", "num_layer"),
        ("start_pos=1.5", "start_pos=1.5: expected an integer of int64"),
        (f"start_pos={2**63}", "expected an integer of int64"),
        ("start_pos=-1", "start_pos"),
        ("start_pos=1000", "start_pos"),
    ],
)
def test_wrong_settings(run, files, setting, text):
    assert_fails(run("run", "key_value_cache", files[0], "-o", files[1], "--set", setting), 2, text)
    assert not files[1].exists()


def test_set_twice(run, files):
    args = ("--set", "num_layer=3", "--set", "num_layer=1")
    assert_fails(run("run", "key_value_cache", files[0], "-o", files[1], *args), 2, "num_layer is set twice")


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"cache": None, "current_key": None}, ("missing arrays current_key, cache; key_value_cache takes",)),
        ({"start_pos": None}, ("missing arrays start_pos",)),
        (
            {"cach": np.zeros(3), "other": np.zeros(3)},
            ("unknown arrays cach (did you mean cache?), other; ",),
        ),
        ({"key": np.zeros(3)}, ("unknown arrays key", "current_value, start_pos, cache, scale, num_layer")),
        ({"num_layer": np.zeros(1, int)}, ("num_layer has shape (1,), an attribute is a 0-d array",)),
        ({"num_layer": np.array(1.5)}, ("num_layer=1.5: expected int",)),
        ({"num_layer": np.array("x")}, ("num_layer='x': expected int",)),
        ({"cache": np.zeros(3)}, ("cache",)),
    ],
)
def test_wrong_arrays(run, files, changes, texts):
    source, output = files
    arrays = {name: array for name, array in (npz.read(source).arrays | changes).items() if array is not None}
    npz.write(source, arrays)
    assert_fails(run("run", "key_value_cache", source, "-o", output), 2, *texts)
    assert not output.exists()


def test_an_error_of_the_operator_leaves_the_file(run, files):
    before = files[0].read_bytes()
    result = run("run", "key_value_cache", files[0], "--in-place", "--set", "layer_idx=7")
    assert_fails(result, 2, "layer_idx")
    assert files[0].read_bytes() == before


def test_no_archive(run, files):
    files[0].write_bytes(files[0].read_bytes()[:-40])
    assert_fails(run("run", "key_value_cache", files[0], "-o", files[1]), 2, f"{files[0]}: not a zip archive")


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_no_gpu(run, tmp_path, kind):
    call = scene(kind, dim=6)
    npz.write(tmp_path / "in.npz", arrays_of(call))
    args = ("run", NAMES[kind], tmp_path / "in.npz", "--backend", "cuda", "--in-place", *settings(call.attrs))
    assert_fails(run(*args), 1, "CUDA")


def test_a_folder_that_may_not_be_written(run, files, monkeypatch):
    monkeypatch.setattr(npz.os, "access", lambda place, mode: False)
    result = run("run", "key_value_cache", files[0], "-o", files[1])
    assert_fails(result, 1, f"{files[1].parent}: Permission denied")


def test_a_full_disk(files):
    """A limit on file sizes ends the write half way; the file that was there stays."""
    source, output = files
    output.write_bytes(b"old")
    command = shlex.join(
        [sys.executable, "-m", "kvkit_cli", "run", "key_value_cache", str(source), "-o", str(output)]
    )
    done = subprocess.run(
        ["sh", "-c", f"ulimit -f 4; exec {command}"], capture_output=True, text=True, check=False
    )
    assert_fails((done.returncode, done.stdout, done.stderr), 1, "File too large")
    assert output.read_bytes() == b"old"
    assert sorted(path.name for path in source.parent.iterdir()) == ["in.npz", "out.npz"]


def break_operator(monkeypatch, error):
    def broken(*args, **attributes):
        raise error

    monkeypatch.setattr(kvkit, "key_value_cache", broken)


def test_memory_runs_out(run, files, monkeypatch):
    break_operator(monkeypatch, MemoryError("for 9 TiB"))
    assert_fails(run("run", "key_value_cache", files[0], "-o", files[1]), 1, "out of memory for 9 TiB")


def test_interrupted(run, files, monkeypatch):
    break_operator(monkeypatch, KeyboardInterrupt())
    code, out, err = run("run", "key_value_cache", files[0], "-o", files[1])
    assert (code, out, err.strip()) == (130, "", "kvkit: interrupted")


@pytest.mark.parametrize("error", [RuntimeError("bug"), ValueError("bug"), TypeError("bug")], ids=repr)
def test_a_bug_keeps_its_traceback(files, monkeypatch, error):
    break_operator(monkeypatch, error)
    with pytest.raises(type(error), match="bug"):
        main(["run", "key_value_cache", str(files[0]), "-o", str(files[1])])
    assert not files[1].exists()


def test_a_reader_that_leaves_early():
    command = f"{shlex.quote(sys.executable)} -m kvkit_cli describe key_value_cache | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("key_value_cache: ")
    assert "Traceback" not in done.stderr
