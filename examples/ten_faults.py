"""Plant ten faults one by one into a language model's cache, and print what kvkit's tools say of each.

The keys and values of SmolLM2-135M-Instruct in data/smollm2_kv.npz, two sequences, lie in a paged cache of
int8 codes. Each fault is one that engines have had. `kvkit.tools.check` and `kvkit.tools.diff` name all ten.

    python examples/ten_faults.py [FOLDER for a file of each, and right.npz]
"""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np

from kvkit.cache import PagedCache
from kvkit.tools import check, diff

DATA = Path(__file__).resolve().parent / "data" / "smollm2_kv.npz"
PAGE = 16


def stored():
    """Return a cache of codes after a step: the arrays for `check`, and the float16 inputs of the codes."""
    data = np.load(DATA)
    keys, values, starts = data["current_key"], data["current_value"], data["seqstarts"]
    layers, _, heads, dim = keys.shape
    cache = PagedCache(
        num_blocks=16, page_size=PAGE, num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype=np.float16,
        quant_bit=8, quant_group=32,
    )  # fmt: skip
    sequences = [cache.blocks.add(data["tokens"][a:b]) for a, b in pairwise(starts)]
    counts = np.diff(starts)
    with cache.begin_step(list(zip(sequences, counts.tolist(), strict=True))) as step:
        for layer in range(layers):
            step.update(keys[layer], values[layer], layer)
    table = np.full((2, max(len(seq.blocks) for seq in sequences)), -1)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    # [layers, heads, rows, ..] -> [layers, pages, rows, heads, ..]
    pages = {
        f"{name}_{what}": array[:, side]
        .reshape(layers, heads, -1, PAGE, array.shape[-1])
        .transpose(0, 2, 3, 1, 4)
        .copy()
        for side, name in enumerate(("key", "value"))
        for what, array in (("cache", cache.cache), ("scale", cache.scale))
    }
    last = counts - 1  # the step of the last tokens
    slots = table[[0, 1], last // PAGE] * PAGE + last % PAGE
    index = {"block_tables": table, "context_lens": counts, "slot_mapping": slots}
    index |= {"slot_sequences": np.arange(2), "slot_positions": last}
    inputs = {}
    for name, tokens in (("key", keys), ("value", values)):
        inputs[f"{name}_cache"] = np.zeros(pages[f"{name}_cache"].shape, np.float16)
        for row, begin, count in zip(table, starts, counts, strict=False):
            for position in range(count):
                place = row[position // PAGE], position % PAGE
                inputs[f"{name}_cache"][:, *place] = tokens[:, begin + position]
    return pages | index, inputs


def copied(arrays):
    return {name: array.copy() for name, array in arrays.items()}


# Faults: what is done to the arrays, and the rule or cause that names it


def page_outside(arrays):
    """The allocator's pool is larger than the cache: P1."""
    arrays["block_tables"][0, 2] = 16


def page_of_another(arrays):
    """A page was freed while it was in use: P3."""
    arrays["block_tables"][1, 1] = arrays["block_tables"][0, 3]


def slot_of_the_step_before(arrays):
    """Slots were made before the positions moved on: S1."""
    arrays["slot_mapping"][0] -= 1


def page_number_for_slot(arrays):
    """A slot is a page's number without its size: S7."""
    arrays["slot_mapping"][:] = arrays["slot_mapping"] // PAGE


def sides_exchanged(arrays):
    """Keys and values were split the wrong way round: L3."""
    for what in ("cache", "scale"):
        arrays[f"key_{what}"], arrays[f"value_{what}"] = arrays[f"value_{what}"], arrays[f"key_{what}"]


def infinite_scale(arrays):
    """One scale overflowed: Q1."""
    arrays["key_scale"][2, arrays["block_tables"][0, 1], 5, 1, 0] = np.inf


def saturated(arrays):
    """A head was quantized with a scale that was fixed too early: Q3."""
    arrays["value_cache"][1, :, :, 2] = np.where(arrays["value_cache"][1, :, :, 2] < 0, -127, 127)


def heads_and_tokens(arrays):
    """A page was written [heads, tokens] and is read [tokens, heads]."""
    pages = arrays["key_cache"]
    arrays["key_cache"] = np.ascontiguousarray(pages.swapaxes(2, 3)).reshape(pages.shape)


def one_row_too_far(arrays):
    """A kernel counts positions from 1."""
    pages = arrays["value_cache"]
    rows = pages.reshape(len(pages), -1, *pages.shape[3:])
    arrays["value_cache"] = np.roll(rows, 1, axis=1).reshape(pages.shape)


def truncated(arrays, inputs):
    """A kernel stores codes without rounding them."""
    for name in ("key", "value"):
        x = inputs[f"{name}_cache"].astype(np.float32)
        scale = arrays[f"{name}_scale"].astype(np.float32).repeat(32, axis=-1)
        quotient = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0).astype(np.float16)
        arrays[f"{name}_cache"] = np.clip(np.trunc(quotient), -127, 127).astype(np.int8)


CHECKED = {
    page_outside: "P1", page_of_another: "P3", slot_of_the_step_before: "S1", page_number_for_slot: "S7",
    sides_exchanged: "L3", infinite_scale: "Q1", saturated: "Q3",
}  # fmt: skip
COMPARED = {
    heads_and_tokens: "heads and tokens swapped", one_row_too_far: "row off by one", truncated: "truncation",
}  # fmt: skip


def main(folder=None):
    """Print what the tools say, and return how many faults they name; a folder gets a file of each."""
    arrays, inputs = stored()
    write(folder, "right", arrays)
    print(f"as it is: {check(arrays)}\n")
    named = 0
    for fault, rule in CHECKED.items():
        wrong = copied(arrays)
        fault(wrong)
        write(folder, fault.__name__, wrong)
        found = check(wrong)
        named += rule in found.rules
        print(f"{fault.__doc__}\n{next((each for each in found if each.rule == rule), 'not named')}\n")
    codes = {name: array for name, array in arrays.items() if name.endswith(("cache", "scale"))}
    for fault, cause in COMPARED.items():
        wrong = copied(codes)
        fault(wrong, inputs) if fault is truncated else fault(wrong)
        write(folder, fault.__name__, arrays | wrong)
        best = diff(
            codes, wrong, like={"key_cache": inputs["key_cache"], "value_cache": inputs["value_cache"]}
        ).causes
        named += bool(best) and best[0].name == cause
        print(f"{fault.__doc__}\n{best[0] if best else 'not named'}\n")
    print(f"{named} of {len(CHECKED) + len(COMPARED)} faults are named")
    return named


def write(folder, name, arrays):
    """Write arrays to a file of a folder, if there is one."""
    if folder:
        Path(folder).mkdir(exist_ok=True)
        np.savez(Path(folder) / f"{name}.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:2])
