"""One call at a time: no fork, signal or thread makes a process wait for itself."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import kvkit
from kvkit import KvkitError
from kvkit.runtime import locks

BEGIN = """
import os, sys, threading
import numpy as np, kvkit
new, cache = np.ones((1, 4, 2, 8), np.float32), np.zeros((1, 1, 2, 64, 2, 8), np.float32)

def call():
    return kvkit.key_value_cache(new, new, 0, cache)

def child():
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        sys.exit(os.waitstatus_to_exitcode(status))
    try:
        call()
    except kvkit.KvkitError as error:
        print(error, flush=True)
        os._exit(7)
    os._exit(0)

"""
FORKS = {
    "unused": ("child()", 0),
    "used": ("call()\nchild()", 7),
    "inside a launch": (
        "call()\nfrom kvkit.cpu.launches import running\n"
        "inside = threading.Event()\n"
        "def launch():\n    with running:\n        inside.set()\n        threading.Event().wait()\n"
        "threading.Thread(target=launch, daemon=True).start()\ninside.wait()\nchild()",
        7,
    ),
    "inside a cache": (
        "from kvkit.cache import DynamicCache\n"
        "cache = DynamicCache()\ninside = threading.Event()\n"
        "def update():\n    with cache._lock:\n        inside.set()\n        threading.Event().wait()\n"
        "threading.Thread(target=update, daemon=True).start()\ninside.wait()\n"
        "call = lambda: cache.update(new, new, 0)\nchild()",
        7,
    ),
    "spawned": (
        "from multiprocessing import get_context\ncall()\n"
        "with get_context('spawn').Pool(1) as pool:\n"
        "    (found, _), (expected, _) = pool.apply(kvkit.key_value_cache, (new, new, 0, cache)), call()\n"
        "assert found.tobytes() == expected.tobytes()",
        0,
    ),
    "new code": ("call()\nnew, cache = new.astype(np.float16), cache.astype(np.float16)\nchild()", 7),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("name", FORKS)
def test_a_fork(name):
    code, expected = FORKS[name]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEGIN + code],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == expected, done.stderr
    assert ("spawn" in done.stdout) == (expected == 7)


@pytest.fixture
def call():
    new, cache = np.ones((1, 4, 2, 8), np.float32), np.zeros((1, 1, 2, 64, 2, 8), np.float32)
    kvkit.key_value_cache(new, new, 0, cache)
    return lambda: kvkit.key_value_cache(new, new, 0, cache)


def within(running, call):
    """Call while a launch runs, as `launches.start` says it."""
    with running:
        locks.BUSY[0] = 1
        try:
            call()
        finally:
            locks.BUSY[0] = 0


def test_calls_of_threads_wait_for_each_other(call):
    from kvkit.cpu.launches import running

    done = threading.Event()
    thread = threading.Thread(target=lambda: (call(), done.set()), daemon=True)

    def waits():
        thread.start()
        assert not done.wait(0.2)

    within(running, waits)
    assert done.wait(20)


def test_a_call_inside_a_call_is_refused(call):
    from kvkit.cpu.launches import running

    answer = []

    def inside():
        with pytest.raises(KvkitError, match="a call inside another"):
            within(running, call)
        answer.append(call())

    thread = threading.Thread(target=inside, daemon=True)  # a deadlock would end with the process
    thread.start()
    thread.join(20)
    assert answer


def test_calls_from_a_signal_handler(call):
    """Each call of the handler is made or refused, and those of the program go on."""
    told = []

    def handler(number, frame):
        try:
            call()
            told.append("made")
        except KvkitError as error:
            told.append(str(error))

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        while len(told) < 300:
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(text == "made" or "a call inside another" in text for text in told)


def test_an_interrupt_leaves_no_turn_taken(call):
    """Whenever Ctrl-C comes, the next call has its turn."""
    from kvkit.cpu.launches import running

    interrupted, is_armed = 0, False

    def handler(number, frame):
        if is_armed:  # a late alarm would interrupt the tests
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for i in range(300):
            try:
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + i % 60 * 1e-6)
                for _ in range(100):
                    call()
                is_armed = False
            except KeyboardInterrupt:
                is_armed = False
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert not running.is_owned()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 100
