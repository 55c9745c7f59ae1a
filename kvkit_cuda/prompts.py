"""Run the gated delta rule over prompts on the device, in chunks, as products of matrices.

For rows i, j of a chunk, with Gamma_ij = e^(g_(j+1) + .. + g_i) for j <= i, else 0, and c_i = g_0 + .. + g_i:

A = beta (K K') Gamma, strictly below the diagonal        P = (Q K') Gamma
D = beta (V - e^c K S) - A D                              errors, from row to row
O = e^c Q S + P D                                         S <- e^c_last S + (K e^(c_last - c))' D

A block takes `COLUMNS` elements of v of a head of a sequence, whose part of the state stays in shared memory
for all chunks. Logarithms of decays are summed from row to row and never subtracted, so none overflows.
"""

import numpy as np
from numba import cuda, types

from kvkit.formats import BY_NAME
from kvkit.formats.elements import BY_DTYPE
from kvkit.formulas import numeric
from kvkit_cuda import recurrent as states
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import INDEX1, INDEX2
from kvkit_cuda.device_runtime import device, host
from kvkit_cuda.recurrent import (
    BETA,
    CHANNELS,
    DK,
    DV,
    HAS_BETA,
    HEADS,
    KEYS,
    OUT,
    QUERIES,
    SCALE,
    STATE,
    TURNED,
    G,
    K,
    Q,
    V,
    decay_of,
    norm_factor,
    read_float,
    tables_of,
)

THREADS = 128  # of a block
ROWS, COLUMNS, MOST_DK = 16, 32, 128  # of a chunk; of v that a block has; channels of a key
KEY_ROWS, PAIRS, VALUES, CELLS = ROWS * MOST_DK, ROWS * ROWS, ROWS * COLUMNS, MOST_DK * COLUMNS
FACTORS = 2 * ROWS
BEGIN, END, STOP, READ, WRITE = range(5)  # columns of `spans`; rows from end to stop get zeros
SIGNATURE = types.void(INDEX1, INDEX2, INDEX2)
float_of = numeric.float_of


@device.inlined
def multiply_pairs(sizes, rows, chunk, betas, system, weights):
    """Write A and P; threads take pairs of rows."""
    key, query, g = chunk
    dk, by_channel = sizes[DK], sizes[CHANNELS] > 1
    for pair in range(cuda.threadIdx.x, PAIRS, cuda.blockDim.x):
        i, j = pair // ROWS, pair % ROWS
        of_key, of_query = np.float32(0), np.float32(0)
        if j <= i and i < rows:
            factor = np.float32(1)
            for c in range(dk):
                if by_channel or c == 0:
                    fall = np.float32(0)
                    for row in range(j + 1, i + 1):
                        fall += g[row * MOST_DK + c]
                    factor = decay_of(fall)
                x = key[j * MOST_DK + c] * factor
                of_key += key[i * MOST_DK + c] * x
                of_query += query[i * MOST_DK + c] * x
        if i < rows:
            system[pair] = betas[i] * of_key if j < i else np.float32(0)
            weights[pair] = of_query


@device.inlined
def decay_rows(sizes, rows, key, query, g, last):
    """Write e^c K and e^c Q over K and Q, and e^c_last; threads take channels."""
    for c in range(cuda.threadIdx.x, sizes[DK], cuda.blockDim.x):
        fall = np.float32(0)
        for i in range(rows):
            at = i * MOST_DK + c
            fall += g[at]
            factor = decay_of(fall)
            key[at] *= factor
            query[at] *= factor
        last[c] = decay_of(fall)


@device.inlined
def decay_to_last(sizes, rows, key, g):
    """Write K e^(c_last - c) over K; threads take channels."""
    for c in range(cuda.threadIdx.x, sizes[DK], cuda.blockDim.x):
        fall = np.float32(0)
        for row in range(rows):
            at = (rows - 1 - row) * MOST_DK + c
            key[at] *= decay_of(fall)
            fall += g[at]


@device.inlined
def update_state(sizes, rows, columns, key, last, errors, state):
    """Write S <- e^c_last S + (K e^(c_last - c))' D."""
    for cell in range(cuda.threadIdx.x, sizes[DK] * columns, cuda.blockDim.x):
        c, j = cell // columns, cell % columns
        s = state[c * COLUMNS + j] * last[c]
        for i in range(rows):
            s += key[i * MOST_DK + c] * errors[i * COLUMNS + j]
        state[c * COLUMNS + j] = s


def row_loaders(read, size):
    """Return device functions that load a chunk's keys, and its queries, keys, g and betas."""
    factor_of = norm_factor(read, size)

    @device.inlined
    def load_keys(sizes, k_at, k_token, rows, key, factors):
        dk = sizes[DK]
        for cell in range(cuda.threadIdx.x, rows * dk, cuda.blockDim.x):
            i, c = cell // dk, cell % dk
            key[i * MOST_DK + c] = read(k_at + i * k_token + c * size) * factors[i]
        cuda.syncthreads()

    @device.inlined
    def load_rows(sizes, places, item, q_at, chunk, betas, factors):
        (token, rows, head, k_at), (key, query, g) = item, chunk
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, rows, cuda.blockDim.x):
            factors[i] = factor_of(k_at + i * places[K, 1], sizes)
            scale = float_of(np.uint32(sizes[SCALE]))
            factors[ROWS + i] = factor_of(q_at + i * places[Q, 1], sizes) * scale
            betas[i] = np.float32(1)
            if sizes[HAS_BETA]:
                betas[i] = read_float(places[BETA, 0] + 4 * ((token + i) * sizes[HEADS] + head))
        cuda.syncthreads()
        dk = sizes[DK]
        for cell in range(cuda.threadIdx.x, rows * dk, cuda.blockDim.x):
            i, c = cell // dk, cell % dk
            at = i * MOST_DK + c
            query[at] = read(q_at + i * places[Q, 1] + c * size) * factors[ROWS + i]
            g[at] = np.float32(0)
            if places[G, 0]:
                row = places[G, 0] + 4 * ((token + i) * sizes[HEADS] + head) * sizes[CHANNELS]
                g[at] = read_float(row + (4 * c if sizes[CHANNELS] > 1 else 0))
        load_keys(sizes, k_at, places[K, 1], rows, key, factors)

    return load_keys, load_rows


def error_finder(read, size):
    """Return a device function that writes D of some columns."""

    @device.inlined
    def find_errors(sizes, v_at, v_token, shape, parts, state, errors):
        (rows, columns), (decayed, betas, system) = shape, parts
        for cell in range(cuda.threadIdx.x, rows * columns, cuda.blockDim.x):
            i, j = cell // columns, cell % columns
            product = np.float32(0)
            if sizes[HAS_BETA]:
                for c in range(sizes[DK]):
                    product += decayed[i * MOST_DK + c] * state[c * COLUMNS + j]
            x = read(v_at + i * v_token + j * size)
            errors[i * COLUMNS + j] = betas[i] * (x - product)
        cuda.syncthreads()
        if sizes[HAS_BETA]:
            for j in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
                for i in range(rows):
                    x = errors[i * COLUMNS + j]
                    for row in range(i):
                        x -= system[i * ROWS + row] * errors[row * COLUMNS + j]
                    errors[i * COLUMNS + j] = x
        cuda.syncthreads()

    return find_errors


def output_writers(write, size):
    """Return device functions that write zeros to rows of some columns, and O."""

    @device.inlined
    def clear(out_at, step, begin, end, columns):
        for cell in range(cuda.threadIdx.x, (end - begin) * columns, cuda.blockDim.x):
            write(out_at + (begin + cell // columns) * step + cell % columns * size, np.float32(0))

    @device.inlined
    def write_outputs(sizes, out_at, step, shape, parts, errors, state):
        (rows, columns), (query, weights) = shape, parts
        for cell in range(cuda.threadIdx.x, rows * columns, cuda.blockDim.x):
            i, j = cell // columns, cell % columns
            o = np.float32(0)
            for c in range(sizes[DK]):
                o += query[i * MOST_DK + c] * state[c * COLUMNS + j]
            for row in range(i + 1):
                o += weights[i * ROWS + row] * errors[row * COLUMNS + j]
            write(out_at + i * step + j * size, o)

    return clear, write_outputs


def state_movers():
    """Return device functions that read and write some columns of a state of float32."""
    load, store = chunks.read("float32", invariant=False), chunks.write("float32")

    @device.inlined
    def load_state(sizes, place, first, columns, state):
        across, along = (4 * sizes[DK], 4) if sizes[TURNED] else (4, 4 * sizes[DV])
        for cell in range(cuda.threadIdx.x, sizes[DK] * columns, cuda.blockDim.x):
            c, j = cell // columns, cell % columns
            state[c * COLUMNS + j] = load(place + (first + j) * across + c * along)

    @device.inlined
    def store_state(sizes, place, first, columns, state):
        across, along = (4 * sizes[DK], 4) if sizes[TURNED] else (4, 4 * sizes[DV])
        for cell in range(cuda.threadIdx.x, sizes[DK] * columns, cuda.blockDim.x):
            c, j = cell // columns, cell % columns
            store(place + (first + j) * across + c * along, state[c * COLUMNS + j])

    return load_state, store_state


def chunk_runner(read, size, write_outputs):
    """Return a device function that runs a chunk of some columns of v of a head."""
    (load_keys, load_rows), find_errors = row_loaders(read, size), error_finder(read, size)

    @device.inlined
    def run_chunk(sizes, places, item, tile, chunk, numbers, results):
        (token, rows, head), (first, columns, out_at) = item, tile
        (key, query, g), (betas, factors, last) = chunk, numbers
        system, weights, errors, state = results
        shared_by = max(sizes[QUERIES] // sizes[HEADS], 1)
        k_at = places[K, 0] + token * places[K, 1] + head * sizes[KEYS] // sizes[HEADS] * places[K, 2]
        v_at = places[V, 0] + token * places[V, 1] + head * places[V, 2] + first * size
        for s in range(shared_by):
            number = head * shared_by + s if shared_by > 1 else head * sizes[QUERIES] // sizes[HEADS]
            q_at = places[Q, 0] + token * places[Q, 1] + number * places[Q, 2]
            load_rows(sizes, places, (token, rows, head, k_at), q_at, chunk, betas, factors)
            multiply_pairs(sizes, rows, chunk, betas, system, weights)
            cuda.syncthreads()
            decay_rows(sizes, rows, key, query, g, last)
            cuda.syncthreads()
            shape, to = (rows, columns), out_at + token * places[OUT, 1] + s * places[OUT, 2]
            find_errors(sizes, v_at, places[V, 1], shape, (key, betas, system), state, errors)
            write_outputs(sizes, to, places[OUT, 1], shape, (query, weights), errors, state)
        cuda.syncthreads()
        load_keys(sizes, k_at, places[K, 1], rows, key, factors)
        decay_to_last(sizes, rows, key, g)
        cuda.syncthreads()
        update_state(sizes, rows, columns, key, last, errors, state)

    return run_chunk


def prompt_kernel(data, out_format):
    """Return the kernel for q, k, v and outputs of some formats, and states of float32."""
    out_size = BY_NAME[out_format].bytes(1)
    clear, write_outputs = output_writers(chunks.write(out_format), out_size)
    load_state, store_state = state_movers()
    run_chunk = chunk_runner(chunks.read(data), BY_NAME[data].bytes(1), write_outputs)

    def prompt(sizes, places, spans):
        key = cuda.shared.array(KEY_ROWS, types.float32)
        query = cuda.shared.array(KEY_ROWS, types.float32)
        g = cuda.shared.array(KEY_ROWS, types.float32)
        state = cuda.shared.array(CELLS, types.float32)
        errors = cuda.shared.array(VALUES, types.float32)
        system = cuda.shared.array(PAIRS, types.float32)
        weights = cuda.shared.array(PAIRS, types.float32)
        last = cuda.shared.array(MOST_DK, types.float32)
        betas = cuda.shared.array(ROWS, types.float32)
        factors = cuda.shared.array(FACTORS, types.float32)
        chunk, numbers, results = (key, query, g), (betas, factors, last), (system, weights, errors, state)
        n = cuda.blockIdx.x // sizes[HEADS]
        head, first = cuda.blockIdx.x - n * sizes[HEADS], cuda.blockIdx.y * COLUMNS
        columns, shared_by = min(sizes[DV] - first, COLUMNS), max(sizes[QUERIES] // sizes[HEADS], 1)
        out_at = places[OUT, 0] + head * shared_by * places[OUT, 2] + first * out_size
        token, end = spans[n, BEGIN], spans[n, END]
        for s in range(shared_by):
            zeros_from = end if spans[n, WRITE] >= 0 else token
            clear(out_at + s * places[OUT, 2], places[OUT, 1], zeros_from, spans[n, STOP], columns)
        if spans[n, WRITE] < 0:
            return
        place = places[STATE, 0] + head * places[STATE, 2]
        load_state(sizes, place + spans[n, READ] * places[STATE, 1], first, columns, state)
        while token < end:
            rows = min(end - token, ROWS)
            run_chunk(sizes, places, (token, rows, head), (first, columns, out_at), chunk, numbers, results)
            token += rows
        cuda.syncthreads()
        store_state(sizes, place + spans[n, WRITE] * places[STATE, 1], first, columns, state)

    return prompt


compiled = device.variants(prompt_kernel, SIGNATURE)


def is_ready(seen, values):
    """Return whether the kernel can run a prompt, for its arrays by name and its other arguments."""
    tokens = [seen.get(name) for name in ("q", "k", "v")]
    if values["return_states"] is not False or type(values["return_capsule"]) is not int:
        return False  # what is not checked yet is refused, or computed, by the CPU's function
    if values["return_capsule"]:
        return False
    if not all(isinstance(each, np.ndarray) and each.ndim in (3, 4) for each in tokens):
        return False
    joined = all(each.flags.c_contiguous for each in tokens) and values["out"] is None
    axes, dk = tokens[0].ndim, tokens[1].shape[-1]
    return (axes == 3 or joined) and dk <= MOST_DK and states.is_ready(seen, values, axes)


def launches(placed):
    """Return the launch of a checked prompt whose arrays are on the device."""
    call, (out,) = placed.call.delta, placed.outputs
    sizes, places = tables_of(call, out.reshape(-1, *out.shape[-2:]))
    sequences = len(call.begins)
    if not sequences:
        return []
    stops = np.append(call.begins[1:], len(call.v))
    spans = np.stack([call.begins, call.ends, stops, call.reads, call.writes], axis=1).astype(np.int64)
    tables = host.tables((sizes, places, spans), placed.stream)
    kernel = compiled(call.fmt.name, BY_DTYPE[out.dtype].name)
    heads, dv = call.v.shape[1:]
    blocks = sequences * heads, -(-dv // COLUMNS)
    return [host.Launch(kernel, blocks, (THREADS, 1), placed.stream, tables)]
