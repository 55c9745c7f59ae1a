"""Cases of latent caches: rows of 512 + 64, beside kvkit's own bfloat16 prefill of heads of 128.

Times of other work are scaled to the operations of the case, so a goal is a share of a rate. All tokens have
the same row, so outputs must equal its value.
"""

import functools

import click
import ml_dtypes
import numpy as np

import kvkit
from benchmarks.suites.measuring import Case, Work
from benchmarks.suites.problem import DIM
from kvkit.formats import encode

BFLOAT16 = ml_dtypes.bfloat16
LATENT, ROPE, NOPE, VALUE, PAGE = 512, 64, 128, 128, 64
SCALE = (NOPE + ROPE) ** -0.5
BATCH, CONTEXT, PREFILL = 2, 8192, 2048
PROMPT, CHUNK, HEADS = 4096, 1024, 8  # of a prompt that is expanded
QUERIES, INDEX_HEADS, POSITIONS, TOP = 8, 64, 65536, 2048


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@functools.lru_cache(maxsize=1)
def prefill():
    """Return (a function of the round, its operations): attention of one sequence to itself."""
    query, key, value = (normal(1, PREFILL, 32, DIM).astype(BFLOAT16) for _ in range(3))
    out = np.empty_like(query)

    def run(i):
        kvkit.multi_head_attention(query, key, value, num_heads=32, head_dim=DIM, out=out)

    return run, 4 * DIM * 32 * PREFILL * (PREFILL + 1) // 2


def decode(heads, format=None):
    """Prepare a step of decoding, beside prefill, or for bytes beside the step over bfloat16 rows."""

    def prepare():
        row = normal(LATENT + ROPE).astype(BFLOAT16)
        pool = np.tile(row, (BATCH * CONTEXT // PAGE, PAGE, 1))
        operations = 2 * heads * BATCH * CONTEXT * (LATENT + ROPE + LATENT)
        run = step(heads, [pool], None)
        if format is None:
            other, done = prefill()
            return Work(run, operations=operations, beside={"prefill": other},
                        shares={"prefill": operations / done})  # fmt: skip
        codes = encode(pool.reshape(-1, LATENT + ROPE).astype(np.float32), format)["codes"]
        coded = step(heads, [codes.reshape(*pool.shape[:2], -1)], format)
        return Work(coded, operations=operations, beside={"bfloat16": run})

    return prepare


def step(heads, pools, format):
    """Return a checked function of the round, which rotates through pools."""
    query, out = (
        normal(BATCH, heads, LATENT + ROPE).astype(BFLOAT16),
        np.empty((BATCH, heads, LATENT), BFLOAT16),
    )
    table = np.random.default_rng(1).permutation(len(pools[0])).reshape(BATCH, -1).astype(np.int32)
    lengths = np.full(BATCH, CONTEXT)

    def run(i):
        pool = pools[i % len(pools)]
        kvkit.mla_attention(query, pool, table, lengths, softmax_scale=SCALE, format=format, out=out)

    run(0)
    row = normal(LATENT + ROPE)[:LATENT]
    if not np.allclose(out.astype(np.float32), row, rtol=0.1, atol=0.01):
        raise click.ClickException("mla_attention: output is not the row that all tokens share")
    return run


def expansion():
    """Prepare attention of a prompt that is expanded a chunk at a time, beside one expanded at once."""
    latent, rope = normal(PROMPT, LATENT).astype(BFLOAT16), normal(PROMPT, 1, ROPE).astype(BFLOAT16)
    up = normal(LATENT, HEADS * (NOPE + VALUE)) / np.float32(LATENT**0.5)
    query = normal(1, PROMPT, HEADS, NOPE + ROPE).astype(BFLOAT16)

    def attend(begin, end, queries, causal):
        """Attend with some queries to the expanded heads of some rows."""
        count = end - begin
        both = (latent[begin:end].astype(np.float32) @ up).astype(BFLOAT16).reshape(count, HEADS, -1)
        rotated = np.broadcast_to(rope[begin:end], (count, HEADS, ROPE))
        key, value = np.concatenate((both[..., :NOPE], rotated), 2)[None], both[None, ..., NOPE:]
        for some, is_causal in zip(queries, causal, strict=True):
            yield kvkit.multi_head_attention(
                query[:, some], key, value, num_heads=HEADS, head_dim=NOPE + ROPE, softmax_scale=SCALE,
                is_causal=is_causal, return_lse=True,
            )  # fmt: skip

    def in_chunks(i):
        """Attend to a chunk with its own queries, then with all later ones; merge by lse."""
        outputs = np.zeros((PROMPT, HEADS, VALUE), BFLOAT16)
        lse = np.full((PROMPT, HEADS), -np.inf, np.float32)
        for begin in range(0, PROMPT, CHUNK):
            end = min(begin + CHUNK, PROMPT)
            queries = [slice(begin, end), slice(end, PROMPT)][: 1 + (end < PROMPT)]
            parts = attend(begin, end, queries, [True, False][: len(queries)])
            for some, (output, own) in zip(queries, parts, strict=True):
                outputs[some], lse[some] = kvkit.merge_attention_states(
                    (outputs[some], output[0]), (lse[some], own[0])
                )
        return outputs

    def at_once(i):
        return next(attend(0, PROMPT, [slice(None)], [True]))[0][0]

    if not np.allclose(*(run(0).astype(np.float32) for run in (in_chunks, at_once)), rtol=0.05, atol=0.02):
        raise click.ClickException("a prompt in chunks: outputs are not those of one expanded at once")
    pairs, size = PROMPT * (PROMPT + 1) // 2, NOPE + ROPE + VALUE
    operations = 2 * HEADS * (pairs * size + PROMPT * LATENT * (NOPE + VALUE))
    return Work(in_chunks, operations=operations, beside={"at once": at_once})


def indexer():
    """Prepare the choice of the best positions, beside the products of its queries and keys."""
    query, weights = normal(QUERIES, INDEX_HEADS, DIM), normal(QUERIES, INDEX_HEADS)
    keys = normal(POSITIONS // PAGE, PAGE, DIM)
    table, lengths = np.arange(len(keys))[None], [POSITIONS]
    flat, rows = query.reshape(-1, DIM), keys.reshape(-1, DIM)

    def run(i):
        scores = kvkit.indexer_scores(query, keys, weights, table, lengths, [0, QUERIES])
        return kvkit.topk_rows(scores, TOP, table, PAGE, [0, QUERIES])

    return Work(run, operations=2 * flat.size * POSITIONS, beside={"products": lambda i: flat @ rows.T})


CASES = [
    *(
        Case(f"decode bfloat16 rows, {heads} heads", decode(heads), {"prefill": goal})
        for heads, goal in ((128, 0.85), (16, 0.6))
    ),
    *(
        Case(f"decode rows of 656 bytes, {heads} heads", decode(heads, "ds_mla"), {"bfloat16": 0.8})
        for heads in (128, 16)
    ),
    Case(f"a prompt of {PROMPT:,} expanded in chunks of {CHUNK:,}", expansion, {"at once": 0.9}),
    Case(f"the best {TOP:,} of {POSITIONS:,} positions", indexer, {"products": 1 / 1.2}),
]
