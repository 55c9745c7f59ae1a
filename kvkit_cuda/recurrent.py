"""Run a step of the gated delta rule on the device: a block takes a head of a sequence.

S <- diag(e^g) S      delta = beta v - erase S'k      S <- S + k delta'      o = scale S'q

Threads take elements of v, so a thread reads and writes its column of a "KV" state [dk, dv], or its row of a
"VK" state [dv, dk]. Neighbouring threads have neighbouring columns. k, q and e^g are in shared memory.
"""

import math

import numpy as np
from numba import cuda, types

from kvkit.formats import BY_NAME
from kvkit.formats.elements import BY_DTYPE
from kvkit.formulas import numeric, recurrent
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import INDEX1, INDEX2
from kvkit_cuda.device_runtime import device, host

THREADS = 128  # of a block
MOST_DK = 512  # channels of a key that shared memory has room for
Q, K, V, OUT, STATE, G, BETA = range(7)  # rows of `places`: address, bytes from token to token, to head
SIGNATURE = types.void(INDEX1, INDEX2, INDEX1, INDEX1)
# Columns of `sizes`; scale and eps are the bits of float32.
(HEADS, QUERIES, KEYS, DK, DV, CHANNELS, TURNED, NORM, SCALE, EPS, HAS_BETA) = range(11)
read_float = chunks.read("float32")
decay_of, error_of = recurrent.decay, recurrent.error
float_of = numeric.float_of


def norm_factor(read, size):
    """Return a device function that returns 1, or with `NORM` 1 / sqrt(sum of x^2 + eps), for a row."""

    @device.inlined
    def norm_factor(address, sizes):
        total = np.float32(0)
        for c in range(sizes[DK]):
            x = read(address + c * size)
            total += x * x
        root = np.float32(math.sqrt(total + float_of(np.uint32(sizes[EPS]))))
        return np.float32(1) / root if sizes[NORM] else np.float32(1)

    return norm_factor


def readouts(read, load, write, bytes_of):
    """Return a device function that writes o = scale S'q of all query heads of a state."""
    size, cell, out_size = bytes_of
    factor_of = norm_factor(read, size)

    @device.inlined
    def read_out(sizes, places, n, head, target, query):
        dk, dv, shared_by = sizes[DK], sizes[DV], max(sizes[QUERIES] // sizes[HEADS], 1)
        across, along = (dk * cell, cell) if sizes[TURNED] else (cell, dv * cell)
        out = places[OUT, 0] + n * places[OUT, 1] + head * shared_by * places[OUT, 2]
        for i in range(shared_by):
            number = head * shared_by + i if shared_by > 1 else head * sizes[QUERIES] // sizes[HEADS]
            q_at = places[Q, 0] + n * places[Q, 1] + number * places[Q, 2]
            cuda.syncthreads()
            for c in range(cuda.threadIdx.x, dk if target else 0, cuda.blockDim.x):
                scale = factor_of(q_at, sizes) * float_of(np.uint32(sizes[SCALE]))
                query[c] = read(q_at + c * size) * scale
            cuda.syncthreads()
            for j in range(cuda.threadIdx.x, dv, cuda.blockDim.x):
                o = np.float32(0)
                for c in range(dk if target else 0):  # a row of padding has no state
                    o += load(target + j * across + c * along) * query[c]
                write(out + i * places[OUT, 2] + j * out_size, o)

    return read_out


def step_kernel(data, state_format, out_format):
    """Return the kernel for q, k, v, states and outputs of some formats."""
    read, write = chunks.read(data), chunks.write(out_format)
    load, store = chunks.read(state_format, invariant=False), chunks.write(state_format)
    size, cell = BY_NAME[data].bytes(1), BY_NAME[state_format].bytes(1)
    factor_of = norm_factor(read, size)
    read_out = readouts(read, load, write, (size, cell, BY_NAME[out_format].bytes(1)))

    def step(sizes, places, reads, writes):
        n = cuda.blockIdx.x // sizes[HEADS]
        head, dk, dv = cuda.blockIdx.x - n * sizes[HEADS], sizes[DK], sizes[DV]
        key = cuda.shared.array(MOST_DK, types.float32)
        decay = cuda.shared.array(MOST_DK, types.float32)
        query = cuda.shared.array(MOST_DK, types.float32)
        if writes[n] < 0:
            read_out(sizes, places, n, head, 0, query)
            return
        k_at = places[K, 0] + n * places[K, 1] + head * sizes[KEYS] // sizes[HEADS] * places[K, 2]
        v_at = places[V, 0] + n * places[V, 1] + head * places[V, 2]
        source = places[STATE, 0] + reads[n] * places[STATE, 1] + head * places[STATE, 2]
        target = places[STATE, 0] + writes[n] * places[STATE, 1] + head * places[STATE, 2]
        g_at = places[G, 0] + 4 * (n * sizes[HEADS] + head) * sizes[CHANNELS]
        factor = factor_of(k_at, sizes)
        for c in range(cuda.threadIdx.x, dk, cuda.blockDim.x):
            key[c] = read(k_at + c * size) * factor
            decay[c] = np.float32(1)
            if places[G, 0]:
                decay[c] = decay_of(read_float(g_at + (4 * c if sizes[CHANNELS] > 1 else 0)))
        cuda.syncthreads()
        beta, erase = np.float32(1), np.float32(0)
        if sizes[HAS_BETA]:
            beta = read_float(places[BETA, 0] + 4 * (n * sizes[HEADS] + head))
            erase = beta
        across, along = (dk * cell, cell) if sizes[TURNED] else (cell, dv * cell)
        for j in range(cuda.threadIdx.x, dv, cuda.blockDim.x):
            product = np.float32(0)
            for c in range(dk):
                product += load(source + j * across + c * along) * decay[c] * key[c]
            delta = error_of(read(v_at + j * size), product, beta, erase)
            for c in range(dk):
                s = load(source + j * across + c * along) * decay[c] + key[c] * delta
                store(target + j * across + c * along, s)
        read_out(sizes, places, n, head, target, query)

    return step


compiled = device.variants(step_kernel, SIGNATURE)


def is_ready(seen, values, axes=3):
    """Return whether a kernel can run a call, for its arrays by name and its other arguments.

    Gates are float32 and lie as they must; `axes` are those of q.
    """
    arrays = [seen.get(name) for name in ("q", "k", "v", "state")]
    gates = [each for each in (seen.get("g"), seen.get("beta")) if each is not None]
    known = all(isinstance(each, np.ndarray) for each in (*arrays, *gates))
    if not known or values["gates"] is not None or arrays[0].ndim != axes:
        return False
    narrow = arrays[3].dtype != np.float32  # a state of bfloat16 is rounded once, after the readout
    flat = all(each.dtype == np.float32 and each.flags.c_contiguous for each in gates)
    return flat and not narrow and 0 < arrays[0].shape[-1] <= MOST_DK


def tables_of(call, out):
    """Return the tables `sizes` and `places` of a checked call, whose output is [tokens, heads, dv]."""
    heads, dv = call.v.shape[1:]
    scale, eps = call.numbers.view(np.uint32).tolist()
    sizes = (
        heads, call.q.shape[1], call.k.shape[1], call.k.shape[2], dv,
        call.k.shape[2] if call.by_channel else 1, call.transposed, call.norm, scale, eps,
        call.beta is not None,
    )  # fmt: skip
    arrays = call.q, call.k, call.v, out, call.state, call.g, call.beta
    places = np.zeros((len(arrays), 3), np.int64)
    for place, array in zip(places, arrays, strict=True):
        if array is not None:
            place[: min(array.ndim, 2) + 1] = array.ctypes.data, *array.strides[:2]
    return np.array(sizes, np.int64), places


def launches(placed):
    """Return the launch of a checked step whose arrays are on the device."""
    call, (out,) = placed.call, placed.outputs
    if not len(call.reads):
        return []
    tables = *tables_of(call, out), call.reads, call.writes
    formats = call.fmt.name, call.state_format.name, BY_DTYPE[out.dtype].name
    blocks = len(call.reads) * call.v.shape[1]
    kernel = compiled(*formats)
    return [host.Launch(kernel, (blocks, 1), (THREADS, 1), placed.stream, host.tables(tables, placed.stream))]
