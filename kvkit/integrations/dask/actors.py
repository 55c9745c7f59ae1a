"""Run shards as Dask actors, distributed over the workers of a cluster."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import distributed

from kvkit.errors import KvkitError, argument_error, describe
from kvkit.integrations.dask.shard import PROTOCOL, ShardActor


class ShardError(KvkitError):
    """Says that a shard did not answer. `ShardedCache.load` loads the last save."""


class ShardActors:
    """Calls methods of all shards at the same time, and names the shards that are lost.

    A call and its result are sent as pickled bytes: Dask takes 1 to 2 ms more to send arrays one by one.
    ``traffic`` counts the bytes in both directions.
    """

    def __init__(
        self, client: distributed.Client, arguments: Sequence[tuple[Any, ...]], timeout: float
    ) -> None:
        if client.asynchronous:
            raise argument_error("client", "one that is not asynchronous", describe(client))
        workers = answering_workers(client, timeout)
        if not workers:
            raise argument_error("client", "one whose cluster has workers", "none")
        self._client, self.timeout, self.traffic = client, timeout, 0
        workers_of_shards = [workers[i % len(workers)] for i in range(len(arguments))]
        self.names = [f"shard {i} on {worker}" for i, worker in enumerate(workers_of_shards)]
        self._futures = [  # a future keeps its actor alive
            client.submit(ShardActor, *shard_arguments, actor=True, pure=False, workers=[worker])
            for shard_arguments, worker in zip(arguments, workers_of_shards, strict=True)
        ]
        self._actors = self._wait_for_actors()
        self.call([("about",)] * len(arguments))  # a shard is made in its first call, which may fail

    def call(self, calls: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """Call ``(method, *arguments)`` of each shard; return the results, None for a shard without a call.

        Raise the first `KvkitError` that a shard raised once all have answered, or `ShardError` if a shard
        has not answered.
        """
        messages = {i: pickle.dumps(call, PROTOCOL) for i, call in enumerate(calls) if call is not None}
        try:
            answers = self._client.sync(self._exchange, messages)
        except Exception as error:  # the client is closed
            answers = dict.fromkeys(messages, error)
        self._refuse_lost({i: answer for i, answer in answers.items() if isinstance(answer, Exception)})
        self.traffic += sum(map(len, messages.values())) + sum(map(len, answers.values()))
        results = [pickle.loads(answers[i]) if i in answers else None for i in range(len(calls))]
        for result in results:
            if isinstance(result, KvkitError):
                raise result
        return results

    def close(self) -> None:
        """Release the actors."""
        self._actors = self._futures = []

    def _wait_for_actors(self) -> list[Any]:
        """Wait until all workers have made their actors; return the actors."""
        lost: dict[int, Exception] = {}
        try:
            distributed.wait(self._futures, self.timeout)
        except TimeoutError as error:
            lost = {i: error for i, future in enumerate(self._futures) if not future.done()}
        for i, future in enumerate(self._futures):
            if i not in lost and future.status != "finished":
                lost[i] = future.exception()
        self._refuse_lost(lost)
        return [future.result() for future in self._futures]

    def _refuse_lost(self, lost: Mapping[int, Exception]) -> None:
        """Raise `ShardError` with the names of lost shards and the reasons."""
        if lost:
            reasons = (
                "none" if isinstance(error, TimeoutError) else f"{type(error).__name__} ({error})"
                for error in lost.values()
            )
            names = ", ".join(self.names[i] for i in lost)
            wanted = f"an answer within {self.timeout:g} s; load the last save"
            raise argument_error(names, wanted, ", ".join(dict.fromkeys(reasons)), ShardError)

    async def _exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Exception]:
        """Send messages by shard; return the answers, or the exception of a shard that is lost."""
        tasks = {i: asyncio.ensure_future(self._answer(i, message)) for i, message in messages.items()}
        _, late = await asyncio.wait(tasks.values(), timeout=self.timeout)
        for task in late:
            task.cancel()
        return {i: TimeoutError() if task in late else task.result() for i, task in tasks.items()}

    async def _answer(self, i: int, message: bytes) -> bytes | Exception:
        try:
            return await self._actors[i].answer(message)
        except Exception as error:
            return error


def answering_workers(client: distributed.Client, timeout: float) -> list[str]:
    """Return the addresses of the workers that answer, because the scheduler may list dead ones."""
    try:
        answers = client.sync(client._run, os.getpid, on_error="return", callback_timeout=timeout)
    except TimeoutError:
        return sorted(client.nthreads())  # a worker hangs; the call that needs it will name it
    return sorted(worker for worker, answer in answers.items() if not isinstance(answer, Exception))
