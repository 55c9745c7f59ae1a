"""No keys or values of a context are made: the memory a call takes beside its inputs and outputs."""

import attention_scenes as scenes
import numpy as np
import pytest
from footprint import needs_status, sizes_by

from kvkit import cpu

GUARD = 4096  # bytes
SCRIPT = """
import numpy as np, kvkit
from footprint import extra

CONTEXT, HEADS, KV_HEADS, DIM, PAGE = 2**15, 16, 4, 128, 128


def call(layout, seqlen, bit, context):
    '''Attention, and KeyValueCache for comparison, over the first tokens of a cache of CONTEXT.'''
    sizes = {0: (CONTEXT, 1, 2, KV_HEADS), 3: (1, 2, KV_HEADS, CONTEXT)}[layout]
    cache = np.ones((*sizes, DIM), np.int8 if bit else np.float16)
    scale = np.full((*sizes, DIM // 8), 0.01, np.float16) if bit else None
    query = np.ones((seqlen, HEADS, DIM), np.float16)
    new = np.ones((seqlen, KV_HEADS, DIM), np.float16)
    pages = np.arange(0, CONTEXT, PAGE)[None]
    out = np.ones_like(query)
    attrs = {"quant_bit": bit, "cache_layout": layout, "cache_mode": 1, "page_size": PAGE}
    heads = {"num_heads": HEADS, "head_dim": DIM, "num_kv_heads": KV_HEADS}

    def starts(kvlen):
        return np.array([0, seqlen]), np.array([0, kvlen]), pages, np.array([kvlen - seqlen])

    def attend(kvlen=CONTEXT):
        kvkit.dynamic_batching.multi_head_cache_attention(
            query, new, new, *starts(kvlen), 0, None, None, cache, scale, out=out, **heads, **attrs)

    def load(kvlen=CONTEXT):
        kvkit.dynamic_batching.key_value_cache(new, new, *starts(kvlen), None, None, cache, scale, **attrs)

    attend(context)
    load(context)
    return attend, load


found = {}
for layout in (0, 3):
    for seqlen in (1, 40):
        for bit in (0, 8):
            attend, load = call(layout, seqlen, bit, CONTEXT // 2)
            found[f"layout {layout}, {seqlen} tokens, quant_bit {bit}"] = extra(attend)
found["key_value_cache"] = extra(load)
"""


@pytest.mark.slow
@needs_status
def test_no_array_of_the_contexts_size():
    """Keys of the context alone would be 32 MB in float16. Half the context is the first to be called."""
    found = sizes_by(SCRIPT)
    assert 64 <= found.pop("key_value_cache") < 66  # the keys and values that it returns are seen
    assert len(found) == 8
    assert max(found.values()) < 4, found


@pytest.fixture
def guarded_scratch(monkeypatch):
    """Put workspaces between guards; check the guards at the end."""
    arenas = []

    class Guarded:
        def __init__(self):
            self.words = np.array([0, -1])

        def at_least(self, size):
            self.memory, self.size = np.full(size + 2 * GUARD + 64, 0xAB, np.uint8), size
            self.begin = GUARD + -(self.memory.ctypes.data + GUARD) % 64
            self.words[:] = self.memory.ctypes.data + self.begin, size
            return int(self.words[0])

    for name in ("workspace", "partials"):
        arenas.append(Guarded())
        monkeypatch.setattr(cpu.attention.prepare, name, arenas[-1])

    def untouched():
        for arena in arenas:
            if hasattr(arena, "memory"):
                outside = np.r_[arena.memory[: arena.begin], arena.memory[arena.begin + arena.size :]]
                assert (outside == 0xAB).all()

    return untouched


@pytest.mark.parametrize(
    "options", [{}, {"is_alibi": True}, {"window": (700, 0)}, {"is_causal": False}], ids=str
)
@pytest.mark.parametrize("new", [1, 3, 20, 100])
def test_nothing_is_written_outside_scratch(new, options, guarded_scratch):
    """Parts of a context that some rows do not see, rows of several tiles, heads that take turns."""
    rng = np.random.default_rng(new)
    for formats in (scenes.FP32, scenes.INT8):
        for lengths in ([(1500, new), (3, new)], [(0, 1500 + new)] if new == 1 else [(40000, new)]):
            call = scenes.dynamic_cache(rng, formats, lengths, heads=4, kv_heads=1, dim=16, **options)
            call.run()
            guarded_scratch()


@pytest.mark.parametrize("place", [0, 1, 48])
def test_scratch_memory_has_every_byte_that_was_asked_for(place, monkeypatch):
    """Also where new memory begins one byte behind a multiple of 64, and one byte more than there is."""
    empty = np.empty

    def placed(size, dtype):
        memory = empty(size + 64, dtype)
        first = (place - memory.ctypes.data) % 64
        return memory[first : first + size]

    arena = cpu.attention.prepare.Workspace()
    monkeypatch.setattr(np, "empty", placed)
    for size in (0, 1, 63, 64, 65, 4097):
        for more in (0, 1):
            wanted = max(size, int(arena.words[1]) + more)
            begin = arena.at_least(wanted)
            end = arena.memory.ctypes.data + arena.memory.nbytes
            assert begin % 64 == 0
            assert arena.memory.ctypes.data <= begin <= begin + wanted <= end
