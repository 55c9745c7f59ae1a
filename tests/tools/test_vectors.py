"""`kvkit.tools.vectors`: the pack of the suite `pmx` is replayed; broken packs and answers are named."""

import hashlib
import json
import os
import re
import shutil

import numpy as np
import pytest
from pack_scenes import answers, pmx_pack

import kvkit
from kvkit.errors import KvkitError
from kvkit.files.errors import FileError
from kvkit.runtime import call_log
from kvkit.tools import vectors
from kvkit.tools.vectors import packs

DIGEST = "25337bb6c9544f61d5c1c602278d3a3353f419a6a17d189561885d7ba0a998e6"  # of all arrays of the pack


@pytest.fixture(scope="module")
def pack():
    return pmx_pack()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs") / "paged"
    vectors.make(folder, "paged", seed=3)
    return folder


@pytest.fixture
def copy(small, tmp_path):
    return shutil.copytree(small, tmp_path / "copy")


def change(folder, edit):
    path = folder / call_log.MANIFEST
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def test_the_pack_of_the_suite_pmx(pack):
    """Equal seeds give equal bytes: a change of them is one that users must hear of."""
    digest = hashlib.sha256()
    for case in packs.manifest(pack)["cases"]:
        for group, name, entry in packs.entries(case):
            digest.update(json.dumps([case["name"], group, name, entry["sha256"]]).encode())
    assert digest.hexdigest() == DIGEST
    manifest = packs.manifest(pack)  # a reader of older packs finds what it knows
    assert manifest["format_version"] == 1
    said = {" ".join(case) for case in manifest["cases"]}
    assert said == {"name operator arguments outputs after unchanged refused reference"}
    files = [path for path in pack.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 5e6
    assert str(vectors.verify(pack)).startswith("fine: ")
    result = vectors.replay(pack)
    assert result.ok, str(result)
    assert len(result.cases) > 100


SHORT = "mla-dense", "dsa-indexer", "kda-prefill", "v4-compress"


@pytest.mark.parametrize(
    "suite",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in SHORT))
        for name in vectors.SUITES
        if name not in ("pmx", "ascend", "paged")
    ],
)
def test_suites(tmp_path, suite):
    """All cases pass, and say in float64 what is right, but what is moved or made of bytes."""
    vectors.make(tmp_path / suite, suite, shapes={"batch": 3} if suite.startswith(("mla", "dsa")) else None)
    assert vectors.verify(tmp_path / suite).ok
    result = vectors.replay(tmp_path / suite)
    assert result.ok, str(result)
    assert len(result.cases) > 8
    vectors.make(tmp_path / "least", suite, shapes={"num_kv_heads": 1, "page_size": 1, "batch": 2})
    assert vectors.replay(tmp_path / "least").ok
    cases = packs.manifest(tmp_path / suite)["cases"]
    assert any(case["refused"] for case in cases) == (suite not in ("dsa-indexer", "dsa-sparse", "v4-decode"))
    for case in cases:
        for name in {"output", "attn_output", "lse"} & case["outputs"].keys():
            assert case["outputs"][name]["dtype"] == "float64"
    if suite.startswith("v4"):
        exact = {case["name"] for case in cases if case["reference"] == "matched precision"}
        written = {f"{what}-{kind}" for what in ("slots", "bytes") for kind in ("csa", "hca")}
        assert exact == (written if suite == "v4-compress" else set())


def test_raw_files(tmp_path):
    vectors.make(tmp_path / "raw", "ascend", raw=True)
    assert not list((tmp_path / "raw").rglob("*.npy"))
    assert vectors.verify(tmp_path / "raw").ok
    assert vectors.replay(tmp_path / "raw").ok


def test_one_operator(tmp_path):
    vectors.make(tmp_path / "one", "ascend", operator="ascend.paged_cache_load")
    assert {case.operator for case in vectors.replay(tmp_path / "one").cases} == {"ascend.paged_cache_load"}


def test_shapes(tmp_path):
    """Of one operator, whose suite is found, in the sizes asked for and in the least there are."""
    asked = {"num_kv_heads": 3, "head_dim": 32, "page_size": 16, "batch": 5}
    vectors.make(tmp_path / "asked", operator="ascend.paged_cache_load", shapes=asked)
    cases = packs.manifest(tmp_path / "asked")["cases"]
    for case in cases:
        shapes = {name: each["shape"] for name, each in case["arguments"].items()}
        assert shapes["key_cache"][1:] == [16, 3, 32]
        assert shapes["block_tables"][0] == 5
    assert vectors.replay(tmp_path / "asked").ok
    for suite in ("ascend", "paged", "pmx"):
        vectors.make(tmp_path / suite, suite, shapes={"num_kv_heads": 1, "page_size": 1, "batch": 2})
        assert vectors.replay(tmp_path / suite).ok, str(vectors.replay(tmp_path / suite))


# Broken packs


def first(manifest):
    return manifest["cases"][0]["outputs"]["attn_output"]


BREAKS = {
    "no format_version": lambda folder: change(folder, lambda m: m.pop("format_version")),
    "format_version 2, not 1": lambda folder: change(folder, lambda m: m.update(format_version=2)),
    "no cases: an empty pack": lambda folder: change(folder, lambda m: m.update(cases=[])),
    "in no case of the manifest": lambda folder: (folder / "more.npy").write_bytes(b""),
    "missing": lambda folder: next(folder.rglob("expected-lse.npy")).unlink(),
    "its SHA-256 differs": lambda folder: np.save(next(folder.rglob("expected-lse.npy")), np.zeros(3)),
    "two cases are called": lambda folder: change(folder, lambda m: m["cases"].append(m["cases"][0])),
    "is outside the pack": lambda folder: change(folder, lambda m: first(m).update(file="../../etc/passwd")),
    "expects nothing": lambda folder: change(folder, lambda m: m["cases"][0].update(outputs={})),
    "no array of float32 .2.":
        lambda folder: change(folder, lambda m: first(m).update(shape=[2], dtype="float32")),
    "it lists no cases": lambda folder: change(folder, lambda m: m.pop("cases")),
    "a case without": lambda folder: change(folder, lambda m: m["cases"].append({"name": 3})),
    "no JSON": lambda folder: (folder / call_log.MANIFEST).write_text("{"),
    "no such file": lambda folder: (folder / call_log.MANIFEST).unlink(),
    "no such folder": shutil.rmtree,
}  # fmt: skip


UNREADABLE = {
    *("no format_version", "format_version 2, not 1", "it lists no cases", "a case without"),
    *("no JSON", "no such file", "no such folder"),
}


@pytest.mark.parametrize("said", BREAKS)
def test_broken_packs(copy, said):
    BREAKS[said](copy)
    try:
        found = vectors.verify(copy)
    except FileError as error:  # of the manifest
        assert said in UNREADABLE
        problems = [str(error)]
    else:
        assert not found.ok
        assert said not in UNREADABLE
        problems = found.problems
    assert any(re.search(said, problem) for problem in problems), problems
    assert all("\n" not in problem for problem in problems)


def test_no_cases_are_no_success(copy):
    change(copy, lambda m: m.update(cases=[]))
    assert not vectors.replay(copy).ok


# Answers


def test_right_answers(pack, tmp_path):
    answers(pack, tmp_path)
    assert vectors.diff(pack, tmp_path).ok


def test_wrong_answers_have_causes(pack, tmp_path):
    """A device whose dynamic append is a row off in one case, and which lost a file of another."""

    def edit(case, given, name, array):
        wrong = case["name"] == "append-dynamic2-fp16-as-is" and name == "cache"
        return np.roll(array, 1, axis=2) if wrong else array

    answers(pack, tmp_path, edit)
    (tmp_path / "merge-fp32" / "lse.npy").unlink()
    found = [case for case in vectors.diff(pack, tmp_path).cases if case.status == "failed"]
    assert {case.case for case in found} == {"merge-fp32", "append-dynamic2-fp16-as-is"}
    why = {case.case: case.why for case in found}
    assert "no such file" in why["merge-fp32"]
    assert "elements differ" in why["append-dynamic2-fp16-as-is"]


def test_a_wrong_kvkit_fails(copy):
    """Expectations that are wrong, an input that changes, a refusal that is missing."""
    change(copy, lambda m: m["cases"][0].update(refused=True))
    path = copy / packs.manifest(copy)["cases"][1]["outputs"]["attn_output"]["file"]
    np.save(path, np.load(path) + 1)
    found = [case.why for case in vectors.replay(copy).cases if case.status == "failed"]
    assert len(found) == 2
    assert found[0] == "was done, but must be refused"
    assert "elements differ" in found[1]
    change(copy, lambda m: m["cases"][0].update(operator="dance"))
    with pytest.raises(KvkitError, match="operator: expected one of"):
        vectors.replay(copy)


@pytest.mark.parametrize("runner", ["onnx", "onnxruntime"])
def test_export(pack, tmp_path, runner):
    onnx, run = pytest.importorskip("onnx"), RUNNERS[runner]
    made = vectors.export(pack, tmp_path)
    assert len(made.written) > 10
    for name in made.written:
        folder = tmp_path / name
        model = onnx.load(folder / "model.onnx")
        onnx.checker.check_model(model)
        data = folder / "test_data_set_0"

        def tensors(kind, data=data):
            paths = sorted(data.glob(f"{kind}_*.pb"))
            return [onnx.numpy_helper.to_array(onnx.load_tensor(path)) for path in paths]

        feeds = {value.name: array for value, array in zip(model.graph.input, tensors("input"), strict=True)}
        [got] = run(model, feeds)
        [expected] = tensors("output")
        limit = 2e-5 if expected.dtype == np.float32 else 4e-3
        assert np.allclose(got.astype(np.float64), expected.astype(np.float64), atol=limit, rtol=limit), name


def by_onnx(model, feeds):
    reference = pytest.importorskip("onnx.reference")
    return reference.ReferenceEvaluator(model).run(None, feeds)


def by_onnxruntime(model, feeds):
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


RUNNERS = {"onnx": by_onnx, "onnxruntime": by_onnxruntime}

# Dumps of KVKIT_LOG


@pytest.fixture
def log(monkeypatch, tmp_path):
    monkeypatch.setenv("KVKIT_LOG_FOLDER", str(tmp_path / "log"))
    monkeypatch.setattr(call_log, "TOTALS", {"calls": 0, "bytes": 0, "silent": False})

    def at(level):
        monkeypatch.setenv("KVKIT_LOG", str(level))
        monkeypatch.setattr(call_log, "level", call_log.limit("KVKIT_LOG", 0))
        return tmp_path / "log"

    return at


def call(bad=False):
    key = np.linspace(-1, 1, 48, dtype=np.float32).reshape(1, 3, 2, 8)
    key[0, 0, 0, 0] = np.nan
    return kvkit.key_value_cache(key, key, 20 if bad else 0, np.zeros((1, 1, 2, 8, 2, 8), np.float16))


LEVELS = [(1, 1, "kvkit: key_value_cache"), (3, 5, "float32 (1, 3, 2, 8)"), (5, 5, "1 not finite")]


@pytest.mark.parametrize(("level", "lines", "words"), [*LEVELS, ("x", 0, ""), (0, 0, "")])
def test_levels(log, capfd, level, lines, words):
    folder = log(level)
    call()
    said = capfd.readouterr().err
    assert len(said.splitlines()) == lines
    assert words in said
    assert not folder.exists()


def test_dumps_are_replayed(log, capfd):
    folder = log(10)
    call()
    with pytest.raises(KvkitError):
        call(bad=True)  # which was written before it was refused
    cache = np.zeros((2, 4, 2, 8), np.float32)
    kvkit.ascend.reshape_and_cache(cache[0], None, cache.copy(), None, np.array([5, -1, 0, 1]))
    assert len(list(folder.iterdir())) == 3
    log(0)
    found = vectors.replay(folder)
    assert [case.status for case in found.cases] == ["ran", "failed", "ran"]
    assert found.cases[1].why.startswith("was refused: start_pos")
    capfd.readouterr()


def test_dumps_of_a_second_process_of_the_same_number_are_kept(log, monkeypatch, capfd):
    """As in containers, where each run may be process 1."""
    folder = log(10)
    for run in range(3):
        monkeypatch.setattr(call_log, "TOTALS", {"calls": 0, "bytes": 0, "silent": False})
        monkeypatch.setattr(call_log, "RUN", {"number": 0})
        for _ in range(run + 1):
            call()
    assert "no dump" not in capfd.readouterr().err
    names = sorted(path.name for path in folder.iterdir())
    pid = os.getpid()
    assert names == sorted(
        f"{pid}{run}-{i + 1:06d}-key_value_cache"
        for run, count in (("", 1), (".1", 2), (".2", 3))
        for i in range(count)
    )


def test_calls_of_a_plan_are_dumped_whole(log, capfd):
    folder, rng = log(10), np.random.default_rng(0)
    new = rng.standard_normal((4, 2, 8), np.float32)
    for cachestarts, more in (([8, 4], {}), ([[8, 0], [4, 12]], {"cache_mode": 1, "page_size": 4})):
        step = kvkit.dynamic_batching.plan([0, 3, 4], [0, 3, 4], cachestarts, [0, 0], 1, **more)
        cache = np.zeros((16, 1, 2, 2, 8), np.float32)
        step.key_value_cache(new, new, cache)
        step.multi_head_cache_attention(new, new, new, cache, num_heads=2, head_dim=8)
    pages = kvkit.paged_plan([[1, 0], [2, 2]], [3, 1], [0, 3, 4], page_size=2)
    keys, values = (np.zeros((3, 2, 2, 8), np.float32) for _ in range(2))
    pages.paged_append(new, new, keys, values, rope=kvkit.Rope(8))
    pages.paged_attention(new, keys, values)
    log(0)
    found = vectors.replay(folder)
    dynamic = ["dynamic_batching.key_value_cache", "dynamic_batching.multi_head_cache_attention"]
    assert [case.operator for case in found.cases] == [*dynamic * 2, "paged_append", "paged_attention"]
    assert {case.status for case in found.cases} == {"ran"}
    manifests = [packs.manifest(each) for each in packs.manifests(folder)]
    [case] = manifests[3]["cases"]
    given = packs.arguments(packs.manifests(folder)[3], case)
    assert given["cachestarts"].tolist() == [[8, 0], [4, 12]]
    assert (given["decoding_batches"], given["cache_mode"], given["page_size"]) == (1, 1, 4)
    capfd.readouterr()


def test_tensors_are_dumped(log, capfd):
    torch = pytest.importorskip("torch")
    folder, new = log(10), torch.ones((1, 3, 2, 8), dtype=torch.bfloat16)
    kvkit.key_value_cache(new, new, 0, torch.zeros((1, 1, 2, 8, 2, 8), dtype=torch.bfloat16))
    assert "no dump" not in capfd.readouterr().err
    log(0)
    assert [case.status for case in vectors.replay(folder).cases] == ["ran"]


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")
def test_dumps_are_for_their_user_alone(log):
    folder = log(10)
    call()
    modes = {path.stat().st_mode & 0o777 for path in folder.rglob("*.*")}
    assert modes == {0o600}
    assert [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())] == [0o700] * 2


def test_limits(log, capfd, monkeypatch):
    folder = log(10)
    monkeypatch.setenv("KVKIT_LOG_CALLS", "2")
    for _ in range(4):
        call()
    assert len(list(folder.iterdir())) == 2
    assert capfd.readouterr().err.count("at their limit") == 1
    monkeypatch.setenv("KVKIT_LOG_CALLS", "100")
    monkeypatch.setenv("KVKIT_LOG_BYTES", "2000")
    call()
    assert len(list(folder.iterdir())) == 2


def test_a_folder_that_cannot_be_written_stops_no_call(log, capfd, monkeypatch, tmp_path):
    log(10)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVKIT_LOG_FOLDER", str(tmp_path / "file"))
    call()
    assert "no dump of key_value_cache" in capfd.readouterr().err


@pytest.mark.parametrize("damage", [(b"False, ", b"False, ("), (b"(3,)", b"(3,9)"), (b"\x93NUMPY", b"PK")])
def test_damaged_arrays_are_refused(tmp_path, damage):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros(3, np.float32))
    path.write_bytes(path.read_bytes().replace(*damage))
    with pytest.raises(KvkitError, match=r"x\.npy: no array of float32 \[3\] \(.*\): make it again"):
        packs.array(tmp_path, {"file": "x.npy", "dtype": "float32", "shape": [3]})


def delta_rule_in_chunks(q, k, v, g, beta, state, in_o="decay", in_a="decay", size=64):
    """Compute one head of one sequence in chunks, as docs/tools/states.md says; state [dk, dv]."""
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q.astype(float), k.astype(float)))
    out = []
    for i in range(0, len(q), size):
        Q, K, V, B, c = (
            q[i:][:size],
            k[i:][:size],
            v[i:][:size],
            beta[i:][:size, None],
            np.cumsum(g[i:][:size]),
        )
        c = c[:, None]
        causal = np.tril(np.ones((len(Q), len(Q))))
        gamma = np.exp(np.where(causal > 0, c - c.T, -np.inf))
        A = np.tril(B * (K @ K.T) * (gamma if in_a == "decay" else 1), -1)
        D = np.linalg.solve(np.eye(len(Q)) + A, B * (V - np.exp(c) * (K @ state)))
        P = (Q @ K.T) * (gamma if in_o == "decay" else causal)
        out.append(Q.shape[1] ** -0.5 * (np.exp(c) * (Q @ state) + P @ D))
        state = np.exp(c[-1]) * state + (K * np.exp(c[-1] - c)).T @ D
    return np.concatenate(out), state


@pytest.mark.parametrize(
    ("masks", "why"),
    [
        ({}, "passed"),
        ({"in_o": "plain"}, "output: 15109 of 20672 elements differ (73.09%)"),
        ({"in_a": "plain"}, "state: 3069 of 10240 elements differ (29.97%)"),
    ],
    ids=["right", "plain causal weights in O", "A without decay"],
)
def test_a_pack_tells_wrong_masks_of_chunks(tmp_path, masks, why):
    """The numbers are those of docs/tools/states.md."""
    pack, results = tmp_path / "pack", tmp_path / "results" / "prompts-KV"
    vectors.make(pack, "gdn-prefill")
    case = next(case for case in packs.manifest(pack)["cases"] if case["name"] == "prompts-KV")
    x = packs.arguments(pack, case)
    output, state = np.zeros(x["v"].shape, np.float32), x["state"]
    for begin, end, slot in zip(x["starts"], x["starts"][1:], x["state_indices"], strict=False):
        for head in range(4 if end > begin else 0):
            arrays = (
                x["q"][:, head // 2],
                x["k"][:, head // 2],
                *(x[name][:, head] for name in ("v", "g", "beta")),
            )
            output[begin:end, head], state[slot, head] = delta_rule_in_chunks(
                *(array[begin:end] for array in arrays), state[slot, head], **masks
            )
    results.mkdir(parents=True)
    np.save(results / "output.npy", output)
    np.save(results / "state.npy", state)
    found = next(case for case in vectors.diff(pack, results.parent).cases if case.case == "prompts-KV")
    assert str(found.why or found.status).splitlines()[0] == why
