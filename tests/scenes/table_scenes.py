"""Make random legal page tables and steps: shared prefixes, placeholders, stale tails, in all forms."""

import numpy as np

FORMS = ("padded", "packed", "rows")


def legal(rng, form=None):
    """Return arguments of `kvkit.tools.check` that break no rule."""
    form = form or str(rng.choice(FORMS))
    page_size, batch = int(rng.choice([1, 2, 4, 16, 64])), int(rng.integers(0, 7))
    blocks = int(rng.integers(60, 200))
    placeholder = 0 if rng.random() < 0.5 else None
    free = list(rng.permutation(np.arange(1 if placeholder == 0 else 0, blocks)))
    sequences, lengths = [], []
    for b in range(batch):
        pages = []
        if b and rng.random() < 0.5:  # begins as an earlier one does, up to a page that is full
            parent = int(rng.integers(b))
            pages = sequences[parent][: int(rng.integers(0, lengths[parent] // page_size + 1))]
        own = int(rng.integers(0 if pages else 1, 8))
        length = (len(pages) + own) * page_size - (int(rng.integers(0, page_size)) if own else 0)
        if rng.random() < 0.1:
            pages, own, length = [], 0, 0
        sequences.append([*pages, *(int(free.pop()) for _ in range(own))])
        lengths.append(length)
    shown = [list(pages) for pages in sequences]
    if placeholder is not None:  # pages that left a window
        for b, pages in enumerate(shown):
            full = lengths[b] // page_size
            if full > 1 and rng.random() < 0.4:
                gone = int(rng.integers(1, full))
                pages[:gone] = [placeholder] * gone
    arrays = {"num_blocks": blocks, "page_size": page_size}
    if placeholder is not None:
        arrays["placeholder"] = placeholder
    if form == "packed":
        arrays |= packed(rng, shown, lengths, page_size)
    else:
        arrays |= padded(rng, shown, lengths, blocks, page_size if form == "rows" else 1)
    arrays |= step(rng, shown, lengths, page_size)
    return arrays


def padded(rng, sequences, lengths, blocks, unit):
    columns = max(map(len, sequences), default=0) + int(rng.integers(0, 3))
    kind = rng.integers(0, 3)
    tail = {0: -1, 1: 0}.get(int(kind))
    dtype = rng.choice([np.int32, np.int64])
    table = np.full((len(sequences), columns), tail, dtype) if tail is not None else rng.integers(
        -1, blocks, (len(sequences), columns)
    ).astype(dtype) * unit  # fmt: skip
    for b, pages in enumerate(sequences):
        table[b, : len(pages)] = np.array(pages, dtype) * unit
    lengths = np.array(lengths, dtype)
    if unit == 1:
        return {"block_tables": table, "context_lens": lengths}
    return {"cachestarts": table, "kvstarts": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)}


def packed(rng, sequences, lengths, page_size):
    starts = np.cumsum([0, *map(len, sequences)]).astype(np.int32)
    pages = np.array([page for pages in sequences for page in pages], np.int32)
    pages = np.concatenate([pages, rng.integers(-5, 500, int(rng.integers(0, 4))).astype(np.int32)])
    last = [(length - 1) % page_size + 1 if length else 0 for length in lengths]
    arrays = {"kv_indptr": starts, "kv_indices": pages, "kv_last_page_len": np.array(last, np.int32)}
    return arrays | ({"context_lens": np.array(lengths, np.int32)} if rng.random() < 0.5 else {})


def step(rng, sequences, lengths, page_size):
    """Return slots of the last tokens of some sequences, in pages that only one of them has."""
    slots, owners, positions = [], [], []
    for b, (pages, length) in enumerate(zip(sequences, lengths, strict=True)):
        for position in range(max(0, length - int(rng.integers(0, 4))), length):
            page = pages[position // page_size]
            alone = sum(page in other for other in sequences) == 1
            if alone and page != 0:
                slots.append(page * page_size + position % page_size)
                owners.append(b)
                positions.append(position)
    slots, owners, positions = (np.array(each, np.int64) for each in (slots, owners, positions))
    if len(slots) and rng.random() < 0.3:  # padding, which has no place
        hidden = rng.integers(len(slots))
        slots[hidden] = -1
    return {"slot_mapping": slots, "slot_sequences": owners, "slot_positions": positions}


def some(rng, wanted, **least):
    """Return a legal scene that is large enough for a mutation, in one of the wanted forms."""
    while True:
        arrays = legal(rng, wanted)
        table = arrays.get("block_tables", arrays.get("kv_indices"))
        if table is not None and table.size >= 4 and all(arrays.get(k) is not None for k in least):
            return arrays
