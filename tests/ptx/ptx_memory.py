"""The memory of the machine that runs PTX, which knows how kernels may use it."""

import numpy as np

WARP = 32


class Fault(Exception):
    """Says that a kernel did something that it must not do."""


class Memory:
    """Gives kernels the parts of the host's memory that they are allowed to use."""

    def __init__(self):
        self.allowed = {}
        self.bounds = None

    def allow(self, begin, size):
        self.allowed[begin] = max(self.allowed.get(begin, 0), begin + size)
        self.bounds = None

    def forbid(self, begin):
        self.allowed.pop(begin, None)
        self.bounds = None

    def check(self, places, size, text):
        if self.bounds is None:
            begins = sorted(self.allowed)
            ends = np.maximum.accumulate([self.allowed[begin] for begin in begins])
            self.bounds = np.array(begins, np.int64), np.array(ends, np.int64)
        if (places % size).any():
            raise Fault(f"not aligned: {text}: {[hex(place) for place in places[places % size > 0][:4]]}")
        begins, ends = self.bounds
        found = np.searchsorted(begins, places, "right") - 1
        wrong = (found < 0) | (places + size > ends[found])
        if wrong.any():
            raise Fault(f"out of bounds: {text}: {[hex(place) for place in places[wrong][:4]]}")

    @staticmethod
    def elements(kind):
        """Return all memory as an array, and the address of its first element."""
        first = 4096
        form = {
            "data": (first, False),
            "shape": (2**47 // kind.size,),
            "typestr": f"<u{kind.size}",
            "version": 3,
        }
        return np.asarray(type("All", (), {"__array_interface__": form})()), first


class Log:
    """Records what a launch does to global memory: (place, block, phase, thread, value) of each byte.

    A phase of a block ends where its threads wait for each other.
    """

    def __init__(self):
        self.invariant, self.read, self.written, self.atomic = [], [], [], []

    def check(self):
        if self.atomic:
            self.check_atomic(np.concatenate(self.atomic, axis=1))
        if not self.written:
            return
        stores = np.concatenate(self.written, axis=1)
        if self.invariant and np.intersect1d(stores[0], np.concatenate(self.invariant)).size:
            raise Fault("memory that is read as invariant is written")
        stores = stores[:, np.lexsort(stores[3::-1])]
        apart = stores[:, 1:] != stores[:, :-1]
        if (~apart[0] & (apart[1] | ~apart[2]) & apart[3] & apart[4]).any():
            raise Fault("threads store different values in one place")
        loads = np.concatenate(self.read, axis=1) if self.read else stores[:, :0]
        used = np.concatenate(
            [stores[:, np.isin(stores[0], loads[0])], loads[:, np.isin(loads[0], stores[0])]], 1
        )
        stored = np.arange(used.shape[1]) < np.isin(stores[0], loads[0]).sum()
        for keys, user in ((used[:1], used[1]), (used[:3], used[3])):  # blocks; threads of a phase
            if shared_by(keys, user, stored):
                raise Fault("threads load what others store")

    def check_atomic(self, changed):
        """Raise if threads use, without waiting, bytes that others change atomically."""
        if self.invariant and np.intersect1d(changed[0], np.concatenate(self.invariant)).size:
            raise Fault("memory that is read as invariant is written")
        others = [used[:4] for used in (*self.read, *self.written)]
        used = np.concatenate([changed[:4], *others], axis=1)
        at_once = np.arange(used.shape[1]) < changed.shape[1]
        for keys, user in ((used[:1], used[1]), (used[:3], used[3])):
            if shared_by(keys, user, at_once):
                raise Fault("threads use what others change at once")


def shared_by(keys, user, stored):
    """Return whether one key has uses of both kinds, by several users."""
    if not user.size:
        return False
    order = np.lexsort(keys)
    keys, user, stored = keys[:, order], user[order], stored[order]
    begins = np.flatnonzero(np.r_[True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)])
    both = np.logical_or.reduceat(stored, begins) & np.logical_or.reduceat(~stored, begins)
    return bool((both & (np.minimum.reduceat(user, begins) != np.maximum.reduceat(user, begins))).any())


def every_byte(places, size):
    return (places[:, None] + np.arange(size)).ravel()


NOBODY, SEVERAL = -1, -2


class Users:
    """Records who used each byte of a block's memory and was not waited for: a thread, and its warp."""

    def __init__(self, size):
        self.thread, self.warp = np.full(size, NOBODY), np.full(size, NOBODY)

    def others(self, at, threads):
        """Return whether another thread is among the users."""
        pairs = (self.thread[at], threads), (self.warp[at], threads // WARP)
        return any(((user != NOBODY) & (user != here)).any() for user, here in pairs)

    def add(self, at, threads):
        for users, here in ((self.thread, threads), (self.warp, threads // WARP)):
            found = np.where((users[at] == NOBODY) | (users[at] == here), here, SEVERAL)
            users[at] = found
            users[at[users[at] != found]] = SEVERAL  # those that come together

    def forget_warps(self, warps):
        """Forget uses by threads of these warps, which have waited for each other."""
        self.thread[np.isin(self.warp, warps)] = NOBODY


class Shared:
    """Holds the memory of a block, and who used it since its threads last waited for each other."""

    def __init__(self, size):
        self.bytes = np.full(size + 16, 0xFF, np.uint8)
        self.known, self.flying = np.zeros(size, bool), np.zeros(size, bool)
        self.forget()

    def forget(self):
        """Forget all uses, because all threads have waited."""
        self.writers, self.readers = Users(self.known.size), Users(self.known.size)

    def forget_warps(self, warps):
        for users in (self.writers, self.readers):
            users.forget_warps(warps)

    def use(self, places, size, threads, writes, text):
        """Record a use, and return the bytes that threads may now read or write."""
        if (places < 0).any() or (places + size > self.known.size).any():
            raise Fault(f"out of bounds: {text}")
        if (places % size).any():
            raise Fault(f"not aligned: {text}")
        at, thread = every_byte(places, size), np.repeat(threads, size)
        if self.flying[at].any():
            raise Fault(f"a copy has not arrived: {text}")
        if not writes and not self.known[at].all():
            raise Fault(f"shared memory is read before it is written: {text}")
        if self.writers.others(at, thread) or (writes and self.readers.others(at, thread)):
            raise Fault(f"threads do not wait for each other: {text}")
        (self.writers if writes else self.readers).add(at, thread)
        self.known[at] |= writes
        return at
