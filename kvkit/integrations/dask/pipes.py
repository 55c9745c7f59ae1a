"""Shards as processes of this machine, behind pairs of sockets."""

import contextlib
import multiprocessing
import os
import selectors
import signal
import socket
import time

import numba

from kvkit.integrations.dask.messages import HEAD
from kvkit.integrations.dask.shard import Served
from kvkit.integrations.dask.transports import Transport

CHUNK = 2**16  # bytes read at a time


class Pipes(Transport):
    """Messages go out to all at once, as far as each takes them, and answers are taken as they come."""

    def __init__(self, arguments, timeout):
        threads = max(1, (os.cpu_count() or 1) // len(arguments))
        context = multiprocessing.get_context("spawn")
        self._lines, self._processes = [], []
        self._selector = selectors.DefaultSelector()
        for i, each in enumerate(arguments):
            here, there = socket.socketpair()
            process = context.Process(target=serve, args=(there, each, threads), daemon=True)
            process.start()
            there.close()
            here.setblocking(False)
            self._selector.register(here, selectors.EVENT_READ, i)
            self._lines.append(Line(here))
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
            self._lines[i].unsent = memoryview(message)
            self._push(i, answers)
        while len(answers) < len(messages):
            ready = self._selector.select(max(0.0, end - time.monotonic()))
            if not ready:
                return {i: TimeoutError() for i in messages} | answers
            for key, events in ready:
                if events & selectors.EVENT_WRITE:
                    self._push(key.data, answers)
                if events & selectors.EVENT_READ:
                    self._pull(key.data, answers)
        return answers

    def _push(self, i, answers):
        """Send what a shard takes now; the selector says when it takes the rest."""
        line, events = self._lines[i], selectors.EVENT_READ
        try:
            line.push()
        except OSError as error:
            self._lose(i, error, answers)
            return
        if line.unsent:
            events |= selectors.EVENT_WRITE
        if line.events != events:
            line.events = events
            self._selector.modify(line.socket, events, i)

    def _pull(self, i, answers):
        try:
            answer = self._lines[i].pull()
        except (OSError, EOFError) as error:
            self._lose(i, error, answers)
            return
        if answer is not None:
            answers[i] = answer

    def _lose(self, i, error, answers):
        self._selector.unregister(self._lines[i].socket)
        answers[i] = error

    def close(self):
        self._selector.close()
        for line, process in zip(self._lines, self._processes, strict=True):
            line.socket.close()
            process.join(1)
            if process.is_alive():
                process.kill()
        self._lines, self._processes = [], []


class Line:
    """An end of a pipe: what is still to be sent, and what has come of a message."""

    def __init__(self, end):
        self.socket, self.events, self.unsent = end, selectors.EVENT_READ, memoryview(b"")
        self._come = bytearray()

    def push(self):
        """Send, as far as that does not wait."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]

    def pull(self):
        """Read some; a message, once it is whole, and else None."""
        data = self.socket.recv(CHUNK)
        if not data:
            raise EOFError("its process has ended")
        come = self._come
        come += data
        if len(come) < HEAD.size or len(come) < HEAD.size + HEAD.unpack_from(come)[0]:
            return None
        self._come = bytearray()
        return come


def serve(end, arguments, threads):
    """The process of a shard: answers messages until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which is for the process that asks
    line, shard = Line(end), Served(*arguments)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    with contextlib.suppress(OSError, EOFError):
        while True:
            message = line.pull()
            if message is not None:
                end.sendall(shard.answer(message))
