"""Use kvkit's caches and attention in transformers. Importing registers ``attn_implementation="kvkit"``.

``model.generate(past_key_values=...)`` takes a `KvkitCache`. Under ``"kvkit"`` attention reads the cache in
place, codes included. Under ``"eager"`` or ``"sdpa"`` the cache returns tensors of the context. `study`
measures how quantization and eviction change a model's predictions. `compute_states` computes the recurrent
states of a model (the gated delta rule) with kvkit.
"""

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ModuleNotFoundError as error:
    error.add_note("pip install '.[transformers]' in a clone")
    raise

from kvkit.integrations.transformers.attention import NAME, attention_forward
from kvkit.integrations.transformers.bridge import share_threads
from kvkit.integrations.transformers.cache import KvkitCache
from kvkit.integrations.transformers.masks import attention_mask
from kvkit.integrations.transformers.recurrent import compute_states
from kvkit.integrations.transformers.studying import study

__all__ = ["KvkitCache", "compute_states", "study"]

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)  # without it transformers would drop every mask
share_threads()
