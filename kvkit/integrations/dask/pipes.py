"""Shards as processes of this machine, behind pairs of sockets."""

import contextlib
import multiprocessing
import os
import signal
import socket
import time

import numba

from kvkit.integrations.dask.messages import HEAD
from kvkit.integrations.dask.shard import Served
from kvkit.integrations.dask.transports import Transport

CHUNK = 2**16  # bytes read at a time


class Pipes(Transport):
    """A message goes out to each in turn, who reads it whole before it answers."""

    def __init__(self, arguments, timeout):
        threads = max(1, (os.cpu_count() or 1) // len(arguments))
        context = multiprocessing.get_context("spawn")
        self._ends, self._processes = [], []
        for each in arguments:
            here, there = socket.socketpair()
            process = context.Process(target=serve, args=(there, each, threads), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)
        names = [f"shard {i} in process {each.pid}" for i, each in enumerate(self._processes)]
        super().__init__(names, timeout)
        try:
            self.ask([((), ("about",))] * len(names))
        except BaseException:
            self.close()
            raise

    def exchange(self, messages):
        answers, end = {}, time.monotonic() + self.timeout
        for i, message in messages.items():
            try:
                send(self._ends[i], message, end)
            except OSError as error:  # a timeout among them; the others need not be asked any more
                return {i: error}
        for i in messages:
            try:
                answers[i] = receive(self._ends[i], end)
            except (OSError, EOFError) as error:
                answers[i] = error
        return answers

    def close(self):
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.join(1)
            if process.is_alive():
                process.kill()
        self._ends, self._processes = [], []


def left(end):
    """Seconds until then, and some time for what is there already."""
    return None if end is None else max(0.01, end - time.monotonic())


def send(pipe, message, end=None):
    pipe.settimeout(left(end))
    pipe.sendall(message)


def receive(pipe, end=None):
    """A message, whole."""
    pipe.settimeout(left(end))
    message = pipe.recv(CHUNK)
    if len(message) >= HEAD.size and len(message) == size(message):
        return message
    message = bytearray(message)
    while len(message) < HEAD.size or len(message) < size(message):
        pipe.settimeout(left(end))
        more = pipe.recv(CHUNK)
        if not more:
            raise EOFError("its process has ended")
        message += more
    return message


def size(message):
    return HEAD.size + HEAD.unpack_from(message)[0]


def serve(pipe, arguments, threads):
    """The process of a shard: answers messages until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which is for the process that asks
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    shard = Served(*arguments)
    with contextlib.suppress(OSError, EOFError):
        while True:
            send(pipe, shard.answer(receive(pipe)))
