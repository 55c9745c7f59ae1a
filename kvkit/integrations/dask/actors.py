"""Shards as actors of Dask, in turn on the workers of a cluster."""

import asyncio
import os

import distributed

from kvkit.checks.words import describe, wrong
from kvkit.integrations.dask.shard import Served
from kvkit.integrations.dask.transports import Transport


class Actors(Transport):
    """All are asked in one turn of the client's loop."""

    def __init__(self, client, arguments, timeout):
        if client.asynchronous:
            raise wrong("client", "one that is not asynchronous", describe(client))
        workers = answering(client, timeout)
        if not workers:
            raise wrong("client", "one whose cluster has workers", "none")
        where = [workers[i % len(workers)] for i in range(len(arguments))]
        super().__init__([f"shard {i} on {worker}" for i, worker in enumerate(where)], timeout)
        self._client = client
        self._futures = [  # who holds them keeps the actors
            client.submit(Served, *each, actor=True, pure=False, workers=[worker])
            for each, worker in zip(arguments, where, strict=True)
        ]
        self._shards = self._started()
        self.ask([((), ("about",))] * len(where))

    def _started(self):
        lost = {}
        try:
            distributed.wait(self._futures, self.timeout)
        except TimeoutError as late:
            lost = {i: late for i, future in enumerate(self._futures) if not future.done()}
        lost |= {
            i: future.exception()
            for i, future in enumerate(self._futures)
            if i not in lost and future.status != "finished"
        }
        self.all_there(lost)
        return [future.result() for future in self._futures]

    def exchange(self, messages):
        try:
            return self._client.sync(self._exchange, messages)
        except Exception as error:  # of a client that is closed
            return dict.fromkeys(messages, error)

    async def _exchange(self, messages):
        tasks = {i: asyncio.ensure_future(self._answer(i, each)) for i, each in messages.items()}
        _, late = await asyncio.wait(tasks.values(), timeout=self.timeout)
        for task in late:
            task.cancel()
        return {i: TimeoutError() if task in late else task.result() for i, task in tasks.items()}

    async def _answer(self, i, message):
        try:
            return await self._shards[i].answer(message)
        except Exception as error:
            return error

    def close(self):
        self._shards = self._futures = []


def answering(client, timeout):
    """Addresses of workers; of those that the scheduler has not missed yet none that is dead."""
    ask = {"on_error": "return", "callback_timeout": timeout}
    try:
        said = client.sync(client._run, os.getpid, **ask)
    except TimeoutError:
        return sorted(client.nthreads())  # one is there and says nothing: whoever needs it will tell
    return sorted(worker for worker, answer in said.items() if not isinstance(answer, Exception))
