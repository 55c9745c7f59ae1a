"""Ways to shards: actors of Dask, or processes of this machine behind pipes.

A transport starts shards and asks them: `ask` sends a call to each shard that has one, and waits for all.
"""

import multiprocessing
import time
from typing import Any

from kvkit.checks.words import wrong
from kvkit.errors import KvkitError
from kvkit.integrations.dask.shard import Shard


class ShardError(KvkitError):
    """A shard did not answer; the cache is whole again once it is loaded from its last save."""


def lost(name, timeout, why):
    return wrong(name, f"an answer within {timeout:g} s; load the last save", why, ShardError)


class Actors:
    """Shards as actors of Dask, in turn on the workers of a cluster."""

    def __init__(self, client, arguments, timeout):
        self.timeout = timeout
        workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
        if not workers:
            raise wrong("client", "one whose cluster has workers", "none")
        futures = [
            client.submit(Shard, *each, actor=True, pure=False, workers=[workers[i % len(workers)]])
            for i, each in enumerate(arguments)
        ]
        self.names = [f"shard {i} on {workers[i % len(workers)]}" for i in range(len(futures))]
        self._futures = futures  # who holds them keeps the actors
        self._shards = [self._answer(i, future.result) for i, future in enumerate(futures)]

    def ask(self, method, calls):
        """The answers of all shards whose call, a tuple of arguments, is not None."""
        waiting = {}
        for i, call in enumerate(calls):
            if call is not None:
                waiting[i] = self._answer(
                    i, lambda i=i, call=call: getattr(self._shards[i], method)(*call).result
                )
        end = time.monotonic() + self.timeout
        answers, errors = [None] * len(calls), []
        for i, result in waiting.items():
            try:
                answers[i] = self._answer(i, lambda timeout, result=result: result(timeout), end)
            except Exception as error:
                errors.append(error)
        return _all(answers, errors)

    def _answer(self, i, result, end=None):
        try:
            if end is None:
                return result()
            return result(max(0.01, end - time.monotonic()))
        except KvkitError:
            raise
        except (OSError, RuntimeError, TimeoutError) as error:
            why = "none" if isinstance(error, TimeoutError) else f"{type(error).__name__} ({error})"
            raise lost(self.names[i], self.timeout, why) from error

    def close(self):
        self._shards = self._futures = []


class Pipes:
    """Shards as processes of this machine."""

    def __init__(self, arguments, timeout):
        self.timeout = timeout
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
        self.ask("about", [()] * len(self._ends))

    def ask(self, method, calls):
        """As `Actors.ask`."""
        answers, errors, waiting = [None] * len(calls), [], []
        for i, call in enumerate(calls):
            if call is not None:
                try:
                    self._ends[i].send((method, call))
                    waiting.append(i)
                except OSError as error:
                    errors.append(lost(self.names[i], self.timeout, f"a closed pipe ({error})"))
        end = time.monotonic() + self.timeout
        for i in waiting:
            try:
                if not self._ends[i].poll(max(0.0, end - time.monotonic())):
                    raise lost(self.names[i], self.timeout, "none")
                answers[i], failed = self._ends[i].recv()
                if failed is not None:
                    errors.append(failed)
            except (EOFError, OSError):
                errors.append(lost(self.names[i], self.timeout, "the end of its process"))
            except ShardError as error:
                errors.append(error)
        return _all(answers, errors)

    def close(self):
        for here, process in zip(self._ends, self._processes, strict=True):
            here.close()
            process.join(1)
            if process.is_alive():
                process.kill()
        self._ends, self._processes = [], []


def _all(answers, errors):
    """The answers, or the worst of the errors."""
    for error in sorted(errors, key=lambda error: not isinstance(error, ShardError)):
        raise error
    return answers


def serve(pipe, arguments):
    """The process of a shard: answers calls until the pipe is closed."""
    shard: Shard | None = None
    while True:
        try:
            method, call = pipe.recv()
        except (EOFError, KeyboardInterrupt, OSError):
            return
        failed: KvkitError | None = None
        answer: Any = None
        try:
            shard = shard or Shard(*arguments)
            answer = getattr(shard, method)(*call)
        except KvkitError as error:
            failed = error
        except Exception as error:
            failed = ShardError(f"{method}: {type(error).__name__} ({error})")
        pipe.send((answer, failed))
