"""The command line: what it answers and how fast, what it writes, how it fails."""

import functools
import importlib.util
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import attention_scenes
import click
import numpy as np
import pytest
import scenes
import verbs
from calls import CALLS
from click.testing import CliRunner
from verbs import arrays_of, savez, savez_compressed, split, static_call, whole
from verbs import kvkit as run

import kvkit
from kvkit import KvkitError, cpu
from kvkit.cache import OutOfBlocksError
from kvkit.operators import OPERATORS, REQUIRED
from kvkit.runtime import disk_cache, jit, source_digest
from kvkit.runtime.jit import fingerprint
from kvkit_cli import arguments, clusters, info, npz
from kvkit_cli.main import ARGUMENTS, SECTIONS, VERBS, main
from kvkit_cuda.device_runtime import host, needs

NAMES = {"static": "key_value_cache", "dynamic": "dynamic_batching.key_value_cache"}
LAZY = ("numba", "numpy", "rich", "kvkit", "ml_dtypes", "llvmlite")


def process(*args, **more):
    command = [sys.executable, "-m", "kvkit_cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


def scene(kind, formats=scenes.MOVED[0], **more):
    return getattr(scenes, kind)(np.random.default_rng(0), formats, **more)


def settings(attrs):
    return [word for name, value in attrs.items() for word in ("--set", f"{name}={value}")]


def assert_results(path, scene):
    """Check that a file holds the reference's results of a scene, and nothing else."""
    got = npz.read(path).arrays
    expected = dict(zip(("key", "value", "cache", "scale"), scene.oracle(), strict=True))
    assert sorted(got) == sorted(name for name, array in expected.items() if array is not None)
    for name, array in got.items():
        assert array.dtype == expected[name].dtype
        scenes.assert_same(array, expected[name], name)


@pytest.fixture
def files(tmp_path):
    """Return (IN, OUT): the file of a small static call with its attributes, and a path for results."""
    call = static_call()
    npz.write(tmp_path / "in.npz", whole(call))
    return tmp_path / "in.npz", tmp_path / "out.npz"


# Answers without work


def loaded(*args):
    """Return which of the slow modules a command has loaded when it ends."""
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


@pytest.mark.parametrize("args", [["--help"], ["--version"]], ids=str)
def test_help_loads_nothing(args):
    assert loaded(*args) == []


@pytest.mark.parametrize("args", [["describe", "key_value_cache"], ["run", "--help"]], ids=str)
def test_tables_load_no_numba(args):
    assert not {"numba", "llvmlite"} & set(loaded(*args))


@pytest.mark.perf
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_is_immediate(option):
    seconds = []
    for _ in range(7):
        begin = time.perf_counter()
        assert process(option).returncode == 0
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.3


@pytest.mark.parametrize("words", [[], ["run"], ["vectors", "make"]], ids=str)
def test_help_is_a_verb(words):
    assert run("help", *words) == run(*words, "--help") == run(*words, "-h")
    assert run("--version") == run("-V") == (0, f"kvkit {kvkit.__version__}\n", "")


def test_help_lists_every_verb():
    assert run() == run("--help")
    assert sorted(" ".join(SECTIONS.values()).split()) == sorted(VERBS)
    for verb, (_, line) in VERBS.items():
        assert re.search(rf"  {verb} +{line.split()[0]}", run()[1])


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_begins_with_its_line(verb):
    code, out, err = run(verb, "--help")
    assert (code, err) == (0, "")
    assert " ".join(out.split("\n\n")[1].split()) == VERBS[verb][1]
    command = main.get_command(click.Context(main), verb)
    group = isinstance(command, click.Group)
    found = [param for each in (command.commands.values() if group else [command]) for param in each.params]
    required = [each for each in found if isinstance(each, click.Argument) and each.required]
    assert {each.human_readable_name.rstrip(".") for each in required} <= ARGUMENTS.keys()
    assert not group or "..." not in out.partition("Commands:")[2]
    assert f"\n    kvkit {verb}" in out.partition("Example")[2]


# Tables


def assert_plain(text):
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def words(text):
    """Return the words of a text, without the folding and padding of tables."""
    return "".join(text.split())


def test_ops():
    code, out, err = run("list", "ops")
    assert (code, err) == (0, "")
    assert all(op.name in out and words(op.summary) in words(out) for op in OPERATORS.values())


@pytest.mark.parametrize("op", OPERATORS.values(), ids=list(OPERATORS))
def test_describe(op):
    code, out, err = run("describe", op.name)
    assert (code, err) == (0, "")
    assert_plain(out)
    for thing in (*op.inputs, *op.attributes, *op.outputs):
        assert f"\n {thing.name} " in out
    for attribute in op.attributes:
        default = (
            "required" if attribute.default is REQUIRED else attribute.default or f"{attribute.default!r}"
        )
        if attribute.modes:
            default = attribute.modes[attribute.default][0]
            listed = [f"{number} {name}: {about}" for number, (name, about) in enumerate(attribute.modes)]
            assert words("".join(listed)) in words(out)
        assert f" {attribute.name} {default} " in " ".join(out.split())
    for word, there in (
        ("Inputs:", op.inputs),
        ("Attributes\n", op.attributes),
        ("Outputs: arrays", op.outputs),
        ("Outputs: the in-out arrays.", not op.outputs),
        ("in-out", any(array.inout for array in op.inputs)),
        ("optional", any(array.optional for array in op.inputs)),
        *(
            (f"with {option}", any(array.only_with == option for array in op.outputs))
            for option in sorted(
                {array.only_with for each in OPERATORS.values() for array in each.outputs} - {""}
            )
        ),
        ("window=NUMBER,NUMBER", any(attribute.kind is tuple for attribute in op.attributes)),
    ):
        assert (words(word) in words(out)) == bool(there), word


def described_example(op):
    """Return the command that `describe` ends with, without the name of the program."""
    text = run("describe", op)[1].split("\n\n")[-1]
    program, *args = shlex.split(text.replace("\\\n", ""))
    assert program == "kvkit"
    return args


def test_the_described_example_runs(files):
    source, output = files
    arrays = npz.read(source).arrays
    del arrays["start_pos"], arrays["num_layer"], arrays["layer_idx"]
    arrays["cache"] = arrays["cache"][:, :1]
    npz.write(source, arrays)
    names = {"IN.npz": source, "OUT.npz": output}
    assert run(*(names.get(arg, arg) for arg in described_example("key_value_cache")))[0] == 0
    assert npz.read(output).arrays["key"].shape[1] == arrays["current_key"].shape[1]


@pytest.mark.parametrize("op", OPERATORS.values(), ids=list(OPERATORS))
def test_the_described_example_lacks_nothing_but_arrays(op):
    args = described_example(op.name)
    path = "IN.npz" if "IN.npz" in args else None
    arrays = {array.name: np.zeros(1) for array in op.inputs if "()" not in array.shapes} if path else {}
    settings = [value for flag, value in itertools.pairwise(args) if flag == "--set"]
    inputs, attributes = arguments.bind(op, path, arrays, settings)
    assert REQUIRED not in attributes.values()
    assert all(array.optional or inputs[array.name] is not None for array in op.inputs)


def test_info():
    code, out, err = run("info")
    assert (code, err) == (0, "")
    assert_plain(out)
    for fact in ("numba", "threading layer", "compile cache", "backend cuda"):
        assert fact in out
    assert kvkit.__version__ in out
    assert np.__version__ in out


@pytest.mark.parametrize("found", [True, False])
def test_info_about_a_gpu(found, monkeypatch):
    if found:
        monkeypatch.setattr(needs, "messages", list)
        for name, value in {"current": 0, "require_device": None, "name": "a GPU"}.items():
            monkeypatch.setattr(host, name, lambda *_, value=value: value)
    text = info.system_facts()["backend cuda"]
    expected = "works on a GPU" if found else "not available: kvkit_cuda: expected an NVIDIA GPU"
    assert text.startswith(expected)


def keep_code_in(monkeypatch, folder):
    monkeypatch.setenv("KVKIT_CACHE_DIR", str(folder))
    monkeypatch.setattr(info, "cache_folder", jit.cache_folder.__wrapped__)


@pytest.mark.parametrize("kind", ["off", "new", "file", "open"])
def test_info_says_where_code_is_kept_and_why_none_is(tmp_path, monkeypatch, kind):
    kept = tmp_path / "kept"
    if kind == "open":
        (kept / fingerprint()).mkdir(parents=True)
        (kept / fingerprint()).chmod(0o777)
    elif kind == "file":
        kept.write_text("")
    keep_code_in(monkeypatch, "" if kind == "off" else kept)
    said = json.loads(run("info", "--json")[1])["compile cache"]
    begin, end = {
        "off": ("off: ", "no home directory"),
        "new": (f"{kept / fingerprint()}: 0 files", ""),
        "file": ("none is kept in ", "Not a directory"),
        "open": ("none is kept in ", "others may write to it"),
    }[kind]  # fmt: skip
    assert said.startswith(begin)
    assert said.endswith(end)


def test_clean(tmp_path, monkeypatch):
    monkeypatch.setenv("KVKIT_CACHE_DIR", str(tmp_path))
    for name in ("0" * 20, "f" * 20):
        disk_cache.save(tmp_path / name / "some-code.bin", b"code")
    (tmp_path / "notes").write_text("mine")
    assert run("clean") == (0, f"removed 2 files, 72 B, from {tmp_path}\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    monkeypatch.setenv("KVKIT_CACHE_DIR", "")
    assert run("clean")[1].startswith("removed 0 files")


def test_a_narrow_screen_splits_no_word(monkeypatch):
    monkeypatch.setattr(verbs, "COLUMNS", "60")
    out = run("describe", "dynamic_batching.multi_head_cache_attention")[1]
    assert max(map(len, out.split("kvkit run")[0].splitlines())) <= 60
    for word in ("bfloat16", "optional", "cache_layout", "num_heads"):
        assert word in out
    assert "\n    shape: (seqstarts[B], num_heads, head_dim)\n" in out


def test_info_lists_what_is_compiled(tmp_path, monkeypatch):
    """By module, apart from what other sources and other machines left, and what is gone by now."""
    ours, other, zeros, rest = fingerprint(), "f" * 20, "0" * jit.SOURCE_LETTERS, f"{'1' * 20}.bin"
    now = source_digest.digest("kvkit.cpu.attention.scheduler")[: jit.SOURCE_LETTERS]
    work = "kvkit-cpu-attention-scheduler-work"
    for folder, name in (
        (ours, f"{work}-{now}"), (ours, f"{work}-{zeros}"), (ours, f"kvkit-gone-{zeros}"),
        (other, f"{work}-{now}"), (other, "kvkit_cuda-attention-plain-make"),
    ):  # fmt: skip
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}-{rest}").write_bytes(b"code")
    (tmp_path / ours / f"{work}-gone-{rest}").symlink_to("nowhere")  # as if removed after it was found
    keep_code_in(monkeypatch, tmp_path)
    assert json.loads(run("info", "--json")[1])["compiled"] == [
        {"of": "kvkit.cpu.attention.scheduler", "for": "these sources of kvkit", "variants": 1, "bytes": 4},
        {"of": "all", "for": "another CPU, Python or Numba", "variants": 1, "bytes": 4},
        {"of": "all", "for": "other sources of kvkit", "variants": 2, "bytes": 8},
        {"of": "kvkit_cuda", "for": "GPUs", "variants": 1, "bytes": 4},
    ]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("describe key_v", {"key_value_cache", "dynamic_batching.key_value_cache"}),
        ("run ascend.nd", {"ascend.nd_to_nz"}),
        ("run key_value_cache --set quant", {"quant_bit=", "quant_format=", "quant_group="}),
        ("run key_value_cache IN.npz --set quant_bit=8 --set layer", {"layer_idx="}),
        ("run ascend.reshape_and_cache --set compress_type=KVHEAD_", {"compress_type=KVHEAD_ROPE"}),
        ("warm --back", {"--backend"}),
        ("draw vllm-lbnh", {"vllm-lbnhc", "vllm-lbnh"}),
        ("convert IN.npz OUT.npz --to vllm-lbnh", {"vllm-lbnhc"}),
        ("convert IN.npz OUT.npz --format q8", {"q8_0"}),
        ("study IN.npz --schemes q8_0,int4+had", {"q8_0,int4+hadamard"}),
        ("warm --backend c", {"cpu", "cuda"}),
    ],
)  # fmt: skip
def test_completion(words, offered):
    environment = {"_KVKIT_COMPLETE": "bash_complete", "COMP_WORDS": f"kvkit {words}"}
    done = CliRunner(env=environment | {"COMP_CWORD": str(len(words.split()))}).invoke(
        main, prog_name="kvkit"
    )
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == offered


@pytest.mark.parametrize("command", [["check"], ["inspect", "--stats"]], ids=str)
def test_ctrl_c_does_not_wait_for_numpy(tmp_path, command):
    """A long call that holds no lock of Python is left alone; the process ends at once."""
    np.savez(tmp_path / "pool.npz", key_cache=np.zeros((2, 4, 1, 8)), value_cache=np.zeros((2, 4, 1, 8)))
    code = (
        "import ctypes, signal, sys; from kvkit import tools; from kvkit_cli.__main__ import start\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a shell may have switched off
        "def wait(*_, **__): print('begun', flush=True); ctypes.CDLL(None).sleep(60)\n"
        f"setattr(tools, {command[0]!r}, wait); sys.argv[1:] = {[*command, 'pool.npz']!r}; start()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == "begun\n"
    begin = time.perf_counter()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err.strip()) == (130, "", "kvkit: interrupted")
    assert time.perf_counter() - begin < 5  # one second, on a machine that does nothing else


# Warming


@pytest.mark.slow
def test_warm_compiles_what_a_call_needs(tmp_path):
    """In processes of its own, which run no file of the current folder; the next call compiles nothing."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "numpy.py").write_text("raise SystemExit('a file of the current folder has run')")
    environment = os.environ | {"KVKIT_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "kvkit_cli", "warm", "cache", "--formats", "float16"]
    done = subprocess.run(
        [*command, "--head-dim", "32"], env=environment, cwd=tmp_path / "here", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = sorted(line.split(",")[0] for line in done.stdout.splitlines())
    assert [line[:4] for line in said] == ["1/2 ", "2/2 "]
    assert {line[4:] for line in said} == {"index tensors of a step", "cache of float16"}
    kept = sorted(path.name for path in tmp_path.rglob("*.bin"))
    assert kept
    code = (
        "import numpy as np, kvkit; x = np.ones((1, 1, 1, 32), np.float16)\n"
        "kvkit.key_value_cache(x, x, 0, np.zeros((1, 1, 2, 4, 1, 32), np.float16))"
    )
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert sorted(path.name for path in tmp_path.rglob("*.bin")) == kept


def is_running(number):
    """Return whether a process runs (Linux); a zombie does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children_of(process):
    """Return the process numbers of a process's children (Linux)."""
    return [
        int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("whose", "code", "said"),
    [
        ("children", 1, "kvkit: compiling attention: its process ended with signal 9"),
        ("own", 143, "kvkit: ended by signal 15"),
    ],
)
def test_warm_ends_when_it_or_its_processes_are_killed(tmp_path, whose, code, said):
    """One line and a code, at once, and no process is left."""
    command = [sys.executable, "-m", "kvkit_cli", "warm", "attention", "--quiet"]
    environment = os.environ | {"KVKIT_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as started:
        limit = time.monotonic() + 30
        while len(children := children_of(started)) < min(os.cpu_count(), 2):
            assert time.monotonic() < limit
            time.sleep(0.02)
        for number in children if whose == "children" else ():
            os.kill(number, signal.SIGKILL)
        if whose == "own":
            started.terminate()
        assert started.wait(20) == code
        assert started.stderr.read().replace("index tensors of a step", "attention").strip() == said
    while any(is_running(number) for number in children):
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_warm_for_a_gpu_without_numba_cuda(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = "expected the package numba-cuda, got none: pip install '.[cuda]' in a clone"
    assert_fails(run("warm", "--backend", "cuda"), 1, words)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--capability", "9.0"], 2, "--capability 9.0: only GPUs have one: add --backend cuda"),
        (["--backend", "cuda", "--capability", "nine"], 2, "--capability nine: expected X.Y, as 9.0"),
        (["--backend", "cuda", "--capability", "7.5"], 1, "expected compute capability 8.0 or later"),
    ],
)
def test_warm_for_a_compute_capability_that_is_wrong(options, code, words):
    assert_fails(run("warm", *options), code, words)


# Runs

FORMATS = [
    scenes.Formats("fp32", "fp32"), scenes.Formats("bf16", "bf16"), scenes.Formats("int8", "int8"),
    scenes.Formats("bf16", "int8", "bf16", 8, 8, (24,)), scenes.Formats("fp16", "int8", "fp32", 4, 8, (24,)),
]  # fmt: skip


def test_run_in_a_process(files):
    source, output = files
    done = process("run", "key_value_cache", source, "-o", output)
    assert (done.returncode, done.stderr) == (0, "")
    assert_results(output, static_call())


def test_the_report(files):
    source, output = files
    assert run("run", "key_value_cache", source, "-o", output, "-q") == (0, "", "")
    assert_results(output, static_call())
    ran = json.loads(run("run", "key_value_cache", source, "-o", output, "--json")[1])
    row = {"array": "key", "role": "out", "dtype": "float32", "shape": [2, 5, 2, 6], "bytes": 480}
    assert row in ran["arrays"]
    assert ran["seconds"] > 0
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


def test_check_computes_nothing(files, monkeypatch):
    monkeypatch.setattr(cpu.launches, "start", None)
    code, out, err = run("run", "key_value_cache", files[0], "-o", files[1], "--check")
    assert (code, err) == (0, "")
    assert " out " not in out


def test_names_of_a_file_are_mapped(files):
    """To the operator's, and back where the file is rewritten."""
    source, output = files
    arrays = npz.read(source).arrays
    names = {"current_key": "k", "current_value": "v", "cache": "kv"}
    npz.write(source, {names.get(name, name): array for name, array in arrays.items()})
    options = [word for name, other in names.items() for word in ("--map", f"{other}={name}")]
    assert run("run", "key_value_cache", source, "-o", output, "--in-place", *options)[0] == 0
    assert_results(output, static_call())
    scenes.assert_same(npz.read(source).arrays["kv"], static_call().oracle()[2])


def test_results_can_be_the_next_input(files):
    """With what the next operator needs beside them; what it does not take is passed over."""
    source, output = files
    assert run("run", "key_value_cache", source, "-o", output)[0] == 0
    with np.load(output) as loaded:
        walked = dict(loaded)
    query = np.ones((2, 3, 2, 6), np.float32)
    np.savez(source, **walked, query=query)
    sizes = settings({"num_heads": 2, "head_dim": 6})
    assert run("run", "multi_head_attention", source, "-o", output, *sizes)[0] == 0
    expected = kvkit.multi_head_attention(query, walked["key"], walked["value"], num_heads=2, head_dim=6)
    assert_arrays(output, {"attn_output": expected})

    new = np.ones((2, 1, 2, 6), np.float32)
    np.savez(source, **walked, current_key=new, current_value=new)
    more = settings({"start_pos": 5, "num_layer": 3, "layer_idx": 1})
    assert run("run", "key_value_cache", source, "-o", output, "--in-place", *more)[0] == 0
    assert npz.read(output).arrays["key"].shape == (2, 6, 2, 6)
    assert "key" in npz.read(source).arrays
    np.savez(source, **walked, other=new)
    assert_fails(run("run", "key_value_cache", source, "-o", output, *more), 2, "unknown arrays other; ")


def test_settings_win_over_the_file(files):
    changes = ["--set", "layer_idx=0", "--set", "num_repeat=3", "--set", "start_pos=1"]
    assert run("run", "key_value_cache", files[0], "-o", files[1], *changes)[0] == 0
    assert_results(files[1], static_call().but(layer_idx=0, num_repeat=3, start_pos=1))
    assert npz.read(files[1]).metadata["attributes"]["num_repeat"] == 3


def test_threads(files):
    import numba

    before = numba.get_num_threads()
    try:
        assert run("run", "key_value_cache", files[0], "-o", files[1], "--threads", 1)[0] == 0
        assert numba.get_num_threads() == 1
    finally:
        numba.set_num_threads(before)


# In place


@pytest.mark.parametrize("both", [True, False], ids=["and -o", "alone"])
@pytest.mark.parametrize("formats", FORMATS[1::2], ids=str)
def test_in_place(tmp_path, formats, both):
    call = scene("dynamic", formats)
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    arrays = arrays_of(call)
    npz.write(source, arrays, {"note": "kept", "producer": "me"})
    target = ["-o", output] if both else []
    assert run("run", NAMES["dynamic"], source, "--in-place", *target, *settings(call.attributes))[0] == 0
    _, _, cache, scale = call.oracle()
    after = npz.read(source)
    assert list(after.arrays) == list(arrays)
    for name, array in (arrays | {"cache": cache} | ({} if scale is None else {"scale": scale})).items():
        scenes.assert_same(after.arrays[name], array, name)
    assert (after.metadata["note"], after.metadata["producer"]) == ("kept", "me")
    if both:
        assert_results(output, call)
    assert sorted(path.name for path in tmp_path.iterdir()) == (["in.npz", "out.npz"] if both else ["in.npz"])


def test_in_place_keeps_the_number_in_the_file(files):
    assert run("run", "key_value_cache", files[0], "--in-place", "--set", "start_pos=1")[0] == 0
    assert npz.read(files[0]).arrays["start_pos"] == 3
    expected = static_call().but(start_pos=1).oracle()[2]
    scenes.assert_same(npz.read(files[0]).arrays["cache"], expected)


SLOW = """
import signal, sys, time
from kvkit.files import members
from kvkit_cli.__main__ import start
whole = members.iterate_bytes
def chunks(array):
    yield array.tobytes()[:10]
    print("writing", flush=True)
    time.sleep(60)
members.iterate_bytes = chunks
sys.argv[1:] = {args}
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have switched off
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # or nohup
start()
"""


@pytest.fixture
def writer(files):
    """Yield a process in the middle of an --in-place run."""
    args = ["run", "key_value_cache", str(files[0]), "--in-place", "--quiet"]
    with subprocess.Popen([sys.executable, "-c", SLOW.format(args=args)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as started:  # fmt: skip
        assert started.stdout.readline() == "writing\n"
        yield started
        started.kill()


def test_two_runs_in_place(files, writer):
    """The second one fails, whatever it would do, and the next one need not wait."""
    before = files[0].read_bytes()
    text = f"{files[0]}: another process is changing it in place: wait until it has ended"
    assert_fails(run("run", "key_value_cache", files[0], "--in-place"), 2, text)
    assert files[0].read_bytes() == before
    assert run("run", "key_value_cache", files[0], "-o", files[1])[0] == 0
    writer.kill()
    writer.wait()
    assert len(list(files[0].parent.iterdir())) == 3  # with what the kill left
    assert run("run", "key_value_cache", files[0], "--in-place")[0] == 0
    assert sorted(path.name for path in files[0].parent.iterdir()) == ["in.npz", "out.npz"]
    scenes.assert_same(npz.read(files[0]).arrays["cache"], static_call().oracle()[2])


@pytest.mark.parametrize("name", scenes.first_quick(["SIGTERM", "SIGHUP", "SIGINT"]))
def test_a_signal_leaves_nothing_behind(files, writer, name):
    before, number = files[0].read_bytes(), getattr(signal, name)
    writer.send_signal(number)
    assert writer.wait(20) == 128 + number
    said = writer.stderr.read().strip()
    assert said == ("kvkit: interrupted" if name == "SIGINT" else f"kvkit: ended by signal {int(number)}")
    assert [path.name for path in files[0].parent.iterdir()] == ["in.npz"]
    assert files[0].read_bytes() == before


IMPORTING = """
import os, signal, sys
from kvkit_cli.__main__ import start
class Finder:
    def find_spec(name, *more):
        try:
            if name == "numba.core.typing":
                os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            pass  # as weak references and bare excepts do
sys.meta_path.insert(0, Finder)
sys.argv[1:] = {args}
start()
"""


def test_a_signal_amid_an_import_ends_the_process(files):
    args = ["run", "key_value_cache", str(files[0]), "-o", str(files[1])]
    command = [sys.executable, "-c", IMPORTING.format(args=args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (143, "kvkit: ended by signal 15\n")
    assert not files[1].exists()


CHANGING = """
import functools, os, sys
import kvkit
from kvkit import cpu
from kvkit.files import members, npz
from kvkit_cli.__main__ import start
source, when, size = {source!r}, {when!r}, {size}
npz.MAX_COPIED = -1
def then_change(function):
    @functools.wraps(function)
    def changing(*args, **more):
        if when == "before":
            os.truncate(source, size)
        results = function(*args, **more)
        if when == "after":
            os.truncate(source, size)
        return results
    return changing
kvkit.key_value_cache = then_change(kvkit.key_value_cache)
sys.argv[1:] = ["run", "key_value_cache", source, *{target}]
start()
"""


@pytest.mark.parametrize(
    ("when", "size"), scenes.first_quick([("before", 2**17), ("before", 0), ("after", 0), ("after", 2**20)])
)
def test_an_input_that_changes_while_it_is_mapped(tmp_path, when, size):
    """A line and a code, where the system says nothing, and no results of what is half old, half new."""
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    npz.write(source, whole(static_call(start=2000)))
    words = ["--in-place"] if size == 2**17 or (when, size) == ("after", 0) else ["-o", str(output)]
    code = CHANGING.format(source=str(source), when=when, size=size, target=words)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    text = f"kvkit: {source}: another program changed it while it was in use: run this again\n"
    # Numba's lock between processes has a name from Python 3.14 on, which Python removes and says so.
    said, *more = done.stderr.splitlines(keepends=True)
    assert (done.stdout, said) == ("", text)
    assert not more or "resource_tracker" in more[0]
    assert done.returncode in (1, 2)
    assert source.stat().st_size == size
    assert not output.exists()


CODING = """
import os, sys
from kvkit import tools
from kvkit.files import npz
from kvkit_cli.__main__ import start
convert, source, npz.MAX_COPIED = tools.convert, sys.argv[2], -1
tools.convert = lambda *args, **more: os.truncate(source, 2**12) or convert(*args, **more)
start()
"""


@pytest.mark.slow
def test_a_cache_that_is_shortened_while_it_is_coded(tmp_path):
    source, target = tmp_path / "in.npz", tmp_path / "out.npz"
    npz.write(source, dict.fromkeys(("key", "value"), np.ones((1, 2**12, 1, 64), np.float16)))
    words = ["convert", source, target, "--format", "int8:g32"]
    done = subprocess.run([sys.executable, "-c", CODING, *words], capture_output=True, text=True, check=False)
    text = f"kvkit: {source}: another program changed it while it was in use: run this again\n"
    assert (done.stderr, done.returncode, target.exists()) == (text, 1, False)


# Every operator


WRITERS = npz.write, savez, savez_compressed


def attention(kind, **more):
    """Return a call with every input that it may have."""
    more = {"window": (3, 0), "softmax_scale": 0.1, "return_lse": True} | more
    return split(CALLS[f"{kind.replace('_', ' ')} attention"]().but(**more))


def keys_alone(label):
    call = CALLS[label]()
    return split(call.but(**{name: None for name in ("value", "value_cache") if name in call.inputs}))


def direct(name, arrays, attrs):
    """Return the arrays that a call returns or changes, by name; the given arrays do not change."""
    op, arrays = OPERATORS[name], {name: array.copy() for name, array in arrays.items()}
    given = [arrays.get(array.name) for array in op.inputs if not array.keyword]
    by_keyword = {array.name: arrays.get(array.name) for array in op.inputs if array.keyword}
    results = op.function()(*given, **by_keyword, **attrs)
    changed = {array.name: arrays[array.name] for array in op.inputs if array.inout and array.name in arrays}
    if not op.outputs:
        results = results if isinstance(results, tuple) else (results,)
        returned = [changed[name] for name in op.returned(attrs) if name in changed]
        assert [id(array) for array in results if array is not None] == [id(array) for array in returned]
        return changed
    names = [array.name for array in op.outputs if not array.only_with or attrs.get(array.only_with)]
    outputs = dict(zip(names, results if isinstance(results, tuple) else (results,), strict=True))
    return {name: array for name, array in outputs.items() if array is not None} | changed


def assert_arrays(path, expected):
    got = npz.read(path).arrays
    assert sorted(got) == sorted(expected)
    for name, array in expected.items():
        scenes.assert_same(got[name], array, name)


def every_call():
    """Return every call, also with masks of both types, and with values or keys alone."""
    yield from (split(make()) for make in CALLS.values())
    for kind in attention_scenes.KINDS:
        shape = (4, 3, 16) if kind.startswith("static") else (4, 10)
        yield attention(kind, attn_mask=np.tri(*shape[-2:], 2, bool) & np.ones(shape, bool))
    yield from (keys_alone(label) for label in ("blocks nd", "blocks rope", "contexts", "copies"))
    both = np.random.default_rng(2).standard_normal((5, 2, 4, 2, 16), np.float32)
    of_both = {"key_cache": both, "value_cache": None, "layout": "b kv n h c", "return_lse": True}
    yield split(CALLS["pools"]().but(key_scale=np.float32([1, 2]), **of_both))


@pytest.mark.parametrize(
    ("name", "arrays", "attrs"), [*every_call()], ids=lambda value: value if type(value) is str else ""
)
def test_run_is_the_direct_call(tmp_path, name, arrays, attrs):
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    numpy_has_them = not any("float8" in array.dtype.name for array in arrays.values())
    WRITERS[len(arrays) % 3 if numpy_has_them else 0](source, arrays)
    before = source.read_bytes()
    assert "the call is legal" in run("run", name, source, "--check", *settings(attrs))[1]
    code, out, err = run("run", name, source, "-o", output, *settings(attrs))
    assert (code, err) == (0, "")
    assert source.read_bytes() == before
    assert npz.read(output).metadata["operator"] == name
    expected = direct(name, arrays, attrs)
    assert expected
    assert_arrays(output, expected)
    op, rows = OPERATORS[name], [line.split()[:2] for line in out.splitlines()]
    for array in op.inputs:
        if array.name in arrays:
            assert [array.name, "in-out" if array.inout else "in"] in rows
    in_out = {array.name for array in op.inputs if array.inout and array.name in arrays}  # listed once
    for array in op.outputs:
        assert ([array.name, "out"] in rows) == (array.name in expected and array.name not in in_out)


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("mode", ["KVHEAD_ROPE", 2])
def test_modes_by_name_and_number(tmp_path, mode, in_file):
    name, arrays, attrs = split(CALLS["blocks rope"]())
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    npz.write(source, arrays | ({"compress_type": np.array(mode)} if in_file else {}))
    more = () if in_file else ("--set", f"compress_type={mode}")
    assert run("run", name, source, "-o", output, *more)[0] == 0
    assert_arrays(output, direct(name, arrays, attrs))
    assert npz.read(output).metadata["attributes"]["compress_type"] == 2


@pytest.mark.parametrize("text", ["linear", "'linear'", '"linear"', None])
def test_texts(tmp_path, text):
    name, arrays, attrs = split(CALLS["rotary"]().but(scaling_type="linear", scaling_factor=2.0))
    expected = direct(name, arrays, attrs)
    if text is None:
        arrays["scaling_type"] = np.array(attrs.pop("scaling_type"))
    else:
        attrs["scaling_type"] = text
    npz.write(tmp_path / "in.npz", arrays)
    assert run("run", name, tmp_path / "in.npz", "-o", tmp_path / "out.npz", *settings(attrs))[0] == 0
    assert_arrays(tmp_path / "out.npz", expected)


@pytest.mark.parametrize(
    ("name", "values"),
    [("alibi_slope", {"num_heads": 6}), ("alibi_mask", {"seqlen_q": 2, "seqlen_kv": 3, "num_heads": 3})],
)
def test_a_run_without_a_file(tmp_path, name, values):
    out = tmp_path / "out.npz"
    assert run("run", name, "-o", out, *settings(values))[0] == 0
    ((_, mask),) = npz.read(out).arrays.items()
    scenes.assert_same(mask, getattr(kvkit, name)(**values))


ATTENTION = OPERATORS["multi_head_attention"]


SETTINGS = [
    *(("window", text, value) for text, value in (("(3,0)", (3, 0)), ("-1,4", (-1, 4)), ("[3, 0]", (3, 0)))),
    *(("softmax_scale", text, value) for text, value in (("0.1", 0.1), ("1", 1.0), ("None", None))),
    *(("return_lse", text, True) for text in ("True", "true", "1")),
    *(("is_causal", text, False) for text in ("False", "false", "0")),
    ("window", "(-1, 4)", (-1, 4)), ("num_kv_heads", "4", 4),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "value"), SETTINGS)
def test_settings_are_values(name, text, value):
    arrays = dict.fromkeys(["query", "key", "value", "num_heads", "head_dim"], np.array(1))
    got = arguments.bind(ATTENTION, "in.npz", arrays, [f"{name}={text}"])[1][name]
    assert (got, type(got)) == (value, type(value))
    if value is not None:
        got = arguments.bind(ATTENTION, "in.npz", arrays | {name: np.array(value)}, [])[1][name]
        assert (got, type(got)) == (value, type(value))


# Failures: a code and a line


def assert_fails(result, code, *texts):
    assert result[:2] == (code, "")
    assert result[2].startswith("kvkit: ")
    assert result[2].count("\n") == 1
    assert result[2].endswith("\n")
    for text in texts:
        assert text in result[2]


def test_names_and_texts_of_a_file_cannot_reach_the_terminal(files):
    """Neither to steer it nor to fill it."""
    source, output = files
    arrays, rude = npz.read(source).arrays, "\x1b[31m" * 500
    npz.write(source, arrays | {f"{rude}{i}": np.zeros(1) for i in range(50)})
    result = run("run", "key_value_cache", source, "-o", output)
    assert_fails(result, 2, "unknown arrays ", "... and 45 more; key_value_cache takes")
    assert result[2][:-1].isprintable()
    assert len(result[2]) < 900
    npz.write(source, arrays | {"num_layer": np.array(rude)})
    result = run("run", "key_value_cache", source, "-o", output)
    assert_fails(result, 2, "num_layer=", "...: expected an integer")
    assert result[2][:-1].isprintable()
    result = run("run", "key_value_cache", source, "-o", output, "--set", "\x1b[31m=1")
    assert result[2][:-1].isprintable()


def test_a_folder_that_may_not_be_written(files, monkeypatch):
    monkeypatch.setattr(os, "access", lambda place, mode: False)
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
    assert_fails((done.returncode, done.stdout, done.stderr), 1, f"{output}: File too large")
    assert output.read_bytes() == b"old"
    assert sorted(path.name for path in source.parent.iterdir()) == ["in.npz", "out.npz"]


def break_operator(monkeypatch, error):
    @functools.wraps(kvkit.key_value_cache)
    def broken(*args, **attributes):
        raise error

    monkeypatch.setattr(kvkit, "key_value_cache", broken)


def test_memory_runs_out(files, monkeypatch):
    break_operator(monkeypatch, MemoryError("for 9 TiB"))
    assert_fails(run("run", "key_value_cache", files[0], "-o", files[1]), 1, "out of memory for 9 TiB")


def test_interrupted(files, monkeypatch):
    break_operator(monkeypatch, KeyboardInterrupt())
    code, out, err = run("run", "key_value_cache", files[0], "-o", files[1])
    assert (code, out, err.strip()) == (130, "", "kvkit: interrupted")


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("click", "raise KeyboardInterrupt"),
        ("numpy", "exec('raise KeyboardInterrupt')"),  # as in the text that dataclasses run
        ("numba", "exec('raise KeyboardInterrupt')"),
    ],
)
def test_interrupted_while_modules_are_imported(files, tmp_path, module, line):
    """Ctrl-C may come before anything of ours has run."""
    (tmp_path / f"{module}.py").write_text(line + "\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = process("run", "key_value_cache", files[0], "-o", files[1], env=environment)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "kvkit: interrupted")


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


def test_an_error_of_two_arguments_gets_the_name_of_its_file():
    with pytest.raises(KvkitError, match=r"^a\.npz: num_blocks: expected 3"), clusters.naming("a.npz"):
        raise OutOfBlocksError(3, 2)
