"""Ways to shards: actors of Dask, or processes of this machine behind pipes."""

import contextlib
import multiprocessing
import signal
import threading
import time
from multiprocessing.reduction import ForkingPickler

from kvkit.checks.words import wrong
from kvkit.errors import KvkitError
from kvkit.integrations.dask.shard import Shard

SMALL = 2**15  # bytes that a pipe takes though nobody reads them yet


class ShardError(KvkitError):
    """A shard did not answer; the cache is whole again once it is loaded from its last save."""


class Transport:
    """What starts shards, each with a name, and asks them."""

    names: list[str]

    def __init__(self, timeout):
        self.timeout = timeout

    def ask(self, method, calls):
        """The answers of all shards whose call, a tuple of arguments, is not None.

        Raises what a shard says, once all have answered, or `ShardError` if one does not.
        """
        end, waiting, found = time.monotonic() + self.timeout, {}, {}
        lost: list[KvkitError] = []
        for i, call in enumerate(calls):
            if call is not None:
                with self._noticed(i, lost):
                    waiting[i] = self.send(i, method, call)
        for i, answer in waiting.items():
            with self._noticed(i, lost):
                found[i] = answer(max(0.01, end - time.monotonic()))
        for error in (*lost, *(said for _, said in found.values() if said is not None)):
            raise error
        return [found[i][0] if i in found else None for i in range(len(calls))]

    @contextlib.contextmanager
    def _noticed(self, i, lost):
        """Whatever happens on the way to a shard and back means that it is lost."""
        try:
            yield
        except Exception as error:
            why = "none" if isinstance(error, TimeoutError) else f"{type(error).__name__} ({error})"
            wanted = f"an answer within {self.timeout:g} s; load the last save"
            lost.append(wrong(self.names[i], wanted, why, ShardError))

    def send(self, i, method, call):
        """Send a call; a function that waits so many seconds for what `Shard.answer` returns."""
        raise NotImplementedError

    def close(self):
        raise NotImplementedError


class Actors(Transport):
    """Shards as actors of Dask, in turn on the workers of a cluster."""

    def __init__(self, client, arguments, timeout):
        super().__init__(timeout)
        workers = sorted(client.nthreads())
        if not workers:
            raise wrong("client", "one whose cluster has workers", "none")
        where = [workers[i % len(workers)] for i in range(len(arguments))]
        self.names = [f"shard {i} on {worker}" for i, worker in enumerate(where)]
        self._futures = [  # who holds them keeps the actors
            client.submit(Shard, *each, actor=True, pure=False, workers=[worker])
            for each, worker in zip(arguments, where, strict=True)
        ]
        lost: list[KvkitError] = []
        self._shards = []
        for i, future in enumerate(self._futures):
            with self._noticed(i, lost):
                error = future.exception(timeout)
                if error is None:
                    self._shards.append(future.result(timeout))
                elif isinstance(error, KvkitError):
                    lost.append(error)
                else:
                    raise error
        for error in lost:
            raise error

    def send(self, i, method, call):
        return self._shards[i].answer(method, call).result

    def close(self):
        self._shards = self._futures = []


class Pipes(Transport):
    """Shards as processes of this machine."""

    def __init__(self, arguments, timeout):
        super().__init__(timeout)
        context = multiprocessing.get_context("spawn")
        self._ends, self._processes = [], []
        for each in arguments:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, each), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)
        self.names = [f"shard {i} in process {each.pid}" for i, each in enumerate(self._processes)]
        try:
            self.ask("about", [()] * len(self._ends))
        except BaseException:
            self.close()
            raise

    def send(self, i, method, call):
        end, message = self._ends[i], ForkingPickler.dumps((method, call))
        if len(message) <= SMALL:
            end.send_bytes(message)
        else:  # which waits for whoever reads
            thread = threading.Thread(target=sent, args=(end, message), daemon=True)
            thread.start()

        def answer(timeout):
            if not end.poll(timeout):
                raise TimeoutError
            return end.recv()

        return answer

    def close(self):
        for here, process in zip(self._ends, self._processes, strict=True):
            here.close()
            process.join(1)
            if process.is_alive():
                process.kill()
        self._ends, self._processes = [], []


def sent(end, message):
    """Send; of a process that has ended, whoever waits for its answer will hear."""
    with contextlib.suppress(OSError):
        end.send_bytes(message)


def serve(pipe, arguments):
    """The process of a shard: answers calls until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which is for the process that asks
    shard: Shard | None = None
    while True:
        try:
            method, call = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            shard = shard or Shard(*arguments)
            answer = shard.answer(method, call)
        except KvkitError as error:
            answer = None, error
        pipe.send(answer)
