"""What any way to shards does with messages, and how it tells that a shard is lost."""

from abc import ABC, abstractmethod

from kvkit.checks.words import wrong
from kvkit.errors import KvkitError
from kvkit.integrations.dask.messages import Receiver, Sender


class ShardError(KvkitError):
    """A shard did not answer; the cache is whole again once it is loaded from its last save."""


class Transport(ABC):
    """Asks shards, each of which has a name; `traffic` counts the bytes of messages, both ways."""

    def __init__(self, names, timeout):
        self.names, self.timeout, self.traffic = names, timeout, 0
        self._senders = [Sender() for _ in names]
        self._receivers = [Receiver() for _ in names]

    def ask(self, calls):
        """What the shards return whose call, what a message is made of, is not None; arrays as a list.

        Its other values begin with the name of a method of `Shard`.

        Raises what a shard says, once all have answered, or `ShardError` if one does not.
        """
        messages = {i: self._senders[i].message(*call) for i, call in enumerate(calls) if call is not None}
        answers = self.exchange(messages)
        self.all_there({i: answer for i, answer in answers.items() if isinstance(answer, Exception)})
        self.traffic += sum(map(len, messages.values())) + sum(map(len, answers.values()))
        found, refused = [None] * len(calls), None
        for i in messages:
            arrays, (error, result), *_ = self._receivers[i].read(answers[i])
            found[i], refused = arrays or result, refused or error
        if refused is not None:
            raise refused
        return found

    def all_there(self, lost):
        """Raise `ShardError` if there are shards, by index, that are lost, with the reason of each."""
        if lost:
            reasons = (
                "none" if isinstance(error, TimeoutError) else f"{type(error).__name__} ({error})"
                for error in lost.values()
            )
            names = ", ".join(self.names[i] for i in lost)
            wanted = f"an answer within {self.timeout:g} s; load the last save"
            raise wrong(names, wanted, ", ".join(dict.fromkeys(reasons)), ShardError)

    @abstractmethod
    def exchange(self, messages):
        """Send messages, by shard; the answers, or for those that are lost an exception."""

    @abstractmethod
    def close(self):
        """Let the shards go."""
