"""A model's cache through engines' layouts: Transformers' to vLLM's pages, attention there, PMX's, and back.

data/smollm2_kv.npz has what SmolLM2-135M-Instruct computed for two texts (make_smollm2_kv.py): here as
Transformers keeps it, an array of keys and one of values a layer, the shorter text padded. `convert` moves
that to the pages that vLLM has since 0.26, where `paged_attention` reads it; then to PMX's layout 2, whose
operators also code it to int8; and all the way back. What moves stays equal bit for bit; codes do not.

    pip install '.[files]'
    python examples/engine_layouts.py [FOLDER for the files, demo-out if not given]
"""

import sys
from pathlib import Path

import numpy as np

import kvkit
from kvkit import dynamic_batching, files, tools
from kvkit.layouts import convert, tables, view
from kvkit_cli import show

DATA = Path(__file__).parent / "data" / "smollm2_kv.npz"
PAGE_SIZE, GROUP = 16, 8  # rows of a page; elements that share a scale


def main():
    folder = Path(*(sys.argv[1:] or ["demo-out"]))
    folder.mkdir(exist_ok=True)
    data = files.read(DATA).arrays
    lengths = np.diff(data["seqstarts"])
    queries = data["query"][:, :, -1]  # [layers, texts, heads, dim], of each text's last token
    longest = int(lengths.max())
    path = folder / "hf.safetensors"
    description = files.Description("hf", rope_applied=True, rope_base=1e5)
    files.write(path, {"cache": as_transformers(data, lengths)}, description)
    cache = files.nested(files.read(path).arrays)

    # A row of the batch for each text becomes pages, in random order as an engine's are.
    parts = tables.from_batch(lengths, longest)
    table, _ = tables.to_blocks(tables.packed(lengths, PAGE_SIZE))
    blocks = int(table.max()) + 1
    table = np.append(np.random.default_rng(0).permutation(blocks), -1)[table]
    pages = tables.from_blocks(table, lengths, PAGE_SIZE)
    sizes = {"b": blocks, "n": PAGE_SIZE}
    pool = convert(cache, "hf", "vllm-lbnhc", tables=(parts, pages), to_sizes=sizes, verify=True)
    path = folder / "vllm.npz"
    arrays = {"cache": pool, "block_tables": table, "context_lens": lengths}
    files.write(path, arrays, files.Description("vllm-lbnhc", sizes, tables="blocks", rope_applied=True))
    print(f"{tools.inspect(path)}\n\n{tools.draw.cells(pages, blocks * PAGE_SIZE)}\n")

    rows = {"n": blocks * PAGE_SIZE}
    flat = convert(pool, "vllm-lbnhc", "pmx-dynamic-2", tables=(pages, pages), to_sizes=rows)
    back = {"b": len(lengths), "n": longest}
    again = convert(flat, "pmx-dynamic-2", "hf", tables=(pages, parts), to_sizes=back)

    exact = plain(queries, cache, lengths)
    in_pool = attended(queries, view(pool, "vllm-lbnhc"), table, lengths)
    in_flat = attended(queries, view(flat, "pmx-dynamic-2"), table, lengths)
    in_codes, code_bytes = coded(queries, data, pages, lengths)
    report = show.table("Attention of both last tokens, all layers", "cache", "bytes", "largest difference")
    report.add_row("Transformers, plain numpy", show.size(nbytes(cache)), "the reference")
    report.add_row("vLLM LBNHC pages", show.size(nbytes(pool)), difference(in_pool, exact))
    report.add_row("PMX layout 2", show.size(flat.nbytes), difference(in_flat, exact))
    report.add_row("PMX layout 2, int8", show.size(code_bytes), difference(in_codes, exact))
    show.console().print(report)
    equal = all(np.array_equal(*pair) for pair in zip(flattened(cache), flattened(again), strict=True))
    print(f"vLLM and PMX agree bit for bit: {np.array_equal(in_pool, in_flat)}")
    print(f"back in Transformers' layout the cache is what it was: {equal}")


def as_transformers(data, lengths):
    """Return arrays [texts, heads, longest, dim] by [layer][kv], with zeros behind each text."""
    cache = []
    for pair in zip(data["current_key"], data["current_value"], strict=True):
        layer = [
            np.zeros((len(lengths), each.shape[1], lengths.max(), each.shape[2]), each.dtype) for each in pair
        ]
        for array, each in zip(layer, pair, strict=True):
            for text, (start, length) in enumerate(zip(data["seqstarts"], lengths, strict=False)):
                array[text, :, :length] = each[start : start + length].transpose(1, 0, 2)
        cache.append(layer)
    return cache


def plain(queries, cache, lengths):
    """Compute attention in float64, a query at a time."""
    found = np.zeros(queries.shape)
    for layer, text, head in np.ndindex(queries.shape[:-1]):
        keys, values = (part[text].astype(np.float64)[:, : lengths[text]] for part in cache[layer])
        shared = head * len(keys) // queries.shape[2]
        scores = keys[shared] @ queries[layer, text, head] / np.sqrt(queries.shape[-1])
        weights = np.exp(scores - scores.max())
        found[layer, text, head] = weights @ values[shared] / weights.sum()
    return found


def attended(queries, kv, table, lengths):
    """Attend to pages where they lie; rows of one array are pages too."""
    layers = []
    for query, *sides in zip(queries, kv.keys, kv.values, strict=True):
        keys, values = (side.reshape(-1, PAGE_SIZE, *side.shape[-2:]) for side in sides)
        layers.append(kvkit.paged_attention(query, keys, values, table, lengths))
    return np.stack(layers)


def coded(queries, data, pages, lengths):
    """Append int8 codes by PMX's operators, and attend; return outputs, and the bytes of codes and scales."""
    layers, _, heads, dim = data["current_key"].shape
    rows = int(pages.table.max()) + PAGE_SIZE
    stored = {
        "cache": np.zeros((layers, 2, rows, heads, dim), np.int8),
        "scale": np.zeros((layers, 2, rows, heads, dim // GROUP), np.float16),
    }
    same = {"num_layer": layers, "quant_bit": 8, "quant_group": GROUP, "cache_mode": 1, "cache_layout": 2}
    same |= {"page_size": PAGE_SIZE, "cachestarts": pages.table, "max_seqlen": None, "max_kvlen": None}
    last, found = data["seqstarts"][1:] - 1, []
    before = np.setdiff1d(np.arange(data["seqstarts"][-1]), last)
    for layer, query in enumerate(queries):
        keys, values = data["current_key"][layer], data["current_value"][layer]
        starts = np.concatenate([[0], np.cumsum(lengths - 1)])
        dynamic_batching.key_value_cache(
            keys[before], values[before], seqstarts=starts, kvstarts=starts, start_pos=0 * lengths,
            layer_idx=layer, **stored, **same,
        )  # fmt: skip
        output = dynamic_batching.multi_head_cache_attention(
            query, keys[last], values[last], seqstarts=np.arange(len(lengths) + 1),
            kvstarts=np.concatenate([[0], np.cumsum(lengths)]), start_pos=lengths - 1, layer_idx=layer,
            decoding_batches=len(lengths), num_heads=query.shape[1], num_kv_heads=heads, head_dim=dim,
            **stored, **same,
        )  # fmt: skip
        found.append(output)
    return np.stack(found), nbytes(list(stored.values()))


def flattened(arrays):
    return list(files.flat({"": arrays}).values())


def nbytes(arrays):
    return sum(array.nbytes for array in flattened(arrays))


def difference(got, exact):
    """Return the largest difference, relative to the largest number, as text."""
    return f"{np.abs(got - exact).max() / np.abs(exact).max():.3%}"


if __name__ == "__main__":
    try:
        main()
    except files.FileError as error:
        sys.exit(str(error))
