"""Tools whose parts are tasks of a cluster say, and write, what they do without."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from pack_scenes import pmx_pack

from kvkit.errors import KvkitError
from kvkit.files import npz

distributed = pytest.importorskip("distributed")

import psutil  # noqa: E402  which distributed needs

from kvkit.integrations.dask import mapper, tasks  # noqa: E402

pytestmark = pytest.mark.cpu

GATE = threading.Event()
COMMAND = [sys.executable, "-m", "kvkit_cli"]


@pytest.fixture(scope="module")
def client():
    """Yield a client of two workers in threads of this process."""
    with distributed.Client(
        processes=False, n_workers=2, threads_per_worker=1, dashboard_address=":0"
    ) as client:
        yield client


@pytest.fixture
def run(capfd):
    from kvkit_cli.main import main

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return call


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((3, 40, 2, 64)).astype(np.float16)
    table = {"block_tables": np.array([[1, 2], [3, 0]]), "context_lens": np.array([8, 4])}
    table |= {"num_blocks": np.array(4), "page_size": np.array(4)}
    files = {
        "study": {"key": keys, "value": keys},
        "a": {"key": keys[0], "value": keys[1], "lse": keys[2]},
        "b": {"key": np.roll(keys[0], 1, axis=0), "value": keys[1], "lse": keys[2] * 2},
        "fine": table,
        "wrong": table | {"block_tables": np.array([[1, 2], [2, 0]])},
        "pool": {"cache": rng.standard_normal((2, 4, 2, 8, 2, 16)).astype(np.float16)},
        "pool2": {"cache": rng.standard_normal((2, 3, 2, 8, 2, 16)).astype(np.float16)},
    }
    for name, arrays in files.items():
        npz.write(tmp_path / f"{name}.npz", arrays)
    shutil.copytree(pmx_pack(), tmp_path / "pack")
    (tmp_path / "pack" / "more.npy").write_bytes(b"")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


CALLS = {
    "study": ("study", "study.npz", "--schemes", "fp8,int8:g8,int4:g32", "--json"),
    "diff": ("diff", "a.npz", "b.npz"),
    "check": ("check", "fine.npz", "wrong.npz", "fine.npz"),
    "check as JSON": ("check", "fine.npz", "wrong.npz", "--json"),
    "convert": (
        *("convert", "pool.npz", "pool2.npz", "out", "--from", "l | b kv n h c", "--to", "l | kv b n h c"),
        "--verify"),
    "verify": ("vectors", "verify", "pack"),
    "a file that is none": ("check", "fine.npz", "none.npz"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_same_with_a_cluster(run, folder, client, name):
    found = []
    for more in ((), ("--dask", client.scheduler.address)):
        said = run(*CALLS[name], *more)
        written = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
        assert len(written) == (2 if name == "convert" else 0)
        found.append((said, written))
        for path in (folder / "out").iterdir():
            path.unlink()
    assert found[0] == found[1]
    assert found[0][0][0] == {"study": 0, "convert": 0, "a file that is none": 2}.get(name, 1)


def test_files_that_get_the_same_name(run, folder):
    (folder / "more").mkdir()
    shutil.copy("pool.npz", "more")
    code, out, err = run("convert", "pool.npz", "more/pool.npz", "out", "--to", "hf")
    assert (code, out) == (2, "")
    assert "two IN have this name" in err
    assert not list((folder / "out").iterdir())
    assert "no folder" in run("convert", "pool.npz", "pool2.npz", "none", "--to", "hf")[2]
    assert "expected one FILE" in run("check", "pool.npz", "pool2.npz", "--after", "a.npz")[2]


def test_an_address_that_is_none(run, folder):
    for address in ("local:0", "local:x", "inproc://nobody/1/1"):
        code, out, err = run("vectors", "verify", "pack", "--dask", address)
        assert (code, out) == (2, "")
        assert err.startswith("kvkit: --dask: expected ")


def waits(name):
    if name == "third":
        raise ZeroDivisionError
    return name if name == "first" else GATE.wait(60)


def test_who_stops_asking_cancels(client):
    """And what fails says which task it was."""
    results = mapper(client)(waits, ["first", "second", "fourth", "fifth", "sixth", "seventh"])
    assert next(results) == "first"
    results.close()
    GATE.set()
    end = time.monotonic() + 30
    while client.cluster.scheduler.tasks and time.monotonic() < end:
        time.sleep(0.01)
    assert not client.cluster.scheduler.tasks
    with pytest.raises(ZeroDivisionError) as caught:
        list(mapper(client)(waits, ["first", "third"]))
    assert caught.value.__notes__ == ["in the task of third"]
    assert list(mapper(client)(waits, [])) == []


def listening(pid):
    """Return the addresses of the sockets on which a process listens."""
    sockets = psutil.Process(pid).net_connections("tcp")
    return [each.laddr for each in sockets if each.status == psutil.CONN_LISTEN]


@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell whose sockets listen")
def test_local_workers_are_reached_by_their_user_alone(tmp_path):
    """No socket listens beyond this machine, none takes a client without the key, none serves a page."""
    others = listening(os.getpid())
    with tasks.started("local:1"):
        client = distributed.default_client()
        processes = [os.getpid(), *client.run(os.getpid).values()]
        sockets = {address for pid in processes for address in listening(pid)}.difference(others)
        assert len(sockets) >= 3
        assert {address.ip for address in sockets} == {"127.0.0.1"}
        for address in sockets:
            for path in ("status", "info/main/workers.html", "json/counts.json"):
                with pytest.raises(OSError, match=r"404|reset|closed") as refused:
                    urllib.request.urlopen(f"http://127.0.0.1:{address.port}/{path}", timeout=20)
                if isinstance(refused.value, urllib.error.HTTPError):
                    refused.value.close()  # it holds the page's connection
        port = client.scheduler.address.rpartition(":")[2]
        with pytest.raises(OSError, match=r"Timed out|reset|closed"):
            distributed.Client(f"tcp://127.0.0.1:{port}", timeout=2)
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection(("127.0.0.1", port), timeout=20) as connection,
            pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
            trusting.wrap_socket(connection) as stranger,
        ):
            stranger.recv(1)


def test_local_workers_are_not_started_without_a_key(run, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    code, out, err = run("vectors", "verify", "pack", "--dask", "local:1")
    assert (code, out) == (2, "")
    assert err.startswith("kvkit: --dask local: expected cryptography")


@pytest.mark.slow
def test_a_lost_task_names_its_file():
    def dies(name):
        if name == "second.npz":
            os.kill(os.getpid(), signal.SIGKILL)
        return name

    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0"}
    expected = r"^second\.npz: expected the result of its task, got Killed"
    with distributed.Client(**options) as client, pytest.raises(KvkitError, match=expected):
        list(mapper(client)(dies, ["second.npz"]))


@pytest.mark.slow
def test_processes_and_an_interrupt(folder):
    def run(*more):
        return subprocess.run(
            [*COMMAND, *CALLS["study"], *more], capture_output=True, text=True, timeout=300, check=True
        )

    assert json.loads(run().stdout) == json.loads(run("--dask", "local:2").stdout)
    refused = subprocess.run(
        [*COMMAND, "check", "none.npz", "fine.npz", "--dask", "local:1"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1)
    command = [*COMMAND, "study", "long.npz", "--schemes", "iq4_nl", "--dask", "local:2"]
    keys = np.random.default_rng(0).standard_normal((8, 4096, 8, 128), np.float32).astype(np.float16)
    npz.write(folder / "long.npz", {"key": keys, "value": keys})
    for seconds in 1, 3, 6:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)  # a terminal interrupts the workers, too
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out, err.strip()) == (130, "", "kvkit: interrupted")
