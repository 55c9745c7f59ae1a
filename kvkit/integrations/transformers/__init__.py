"""kvkit's caches and attention in transformers; importing this registers ``attn_implementation="kvkit"``.

`KvkitCache` is what ``model.generate(past_key_values=...)`` takes. Under ``"kvkit"`` attention reads it where
it lies, codes included; under ``"eager"`` or ``"sdpa"`` it hands out tensors of the context. `study` says
what schemes of quantization cost a model.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from kvkit.integrations.transformers.attention import NAME, attention_forward
from kvkit.integrations.transformers.cache import KvkitCache
from kvkit.integrations.transformers.masks import attention_mask
from kvkit.integrations.transformers.studying import study

__all__ = ["KvkitCache", "study"]

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)  # without it transformers would drop every mask
