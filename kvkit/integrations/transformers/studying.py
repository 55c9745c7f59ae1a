"""Measure what quantization costs a model: its keys and values, and its predictions for a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvkit.errors import argument_error
from kvkit.integrations.transformers.attention import attention_forward
from kvkit.integrations.transformers.bridge import to_numpy
from kvkit.integrations.transformers.masks import attention_mask
from kvkit.interop import tensor_of
from kvkit.tools.readers import open_cache
from kvkit.tools.studies.measures import QUERIES
from kvkit.tools.studies.schemes import list_schemes
from kvkit.tools.studies.study import Study, study_layers
from kvkit.tools.tasks import Lazy

NAME = "kvkit-study"


def study(
    model: Any, ids: Sequence[int], schemes: Any, *, progress: Callable[[int, int], Any] | None = None
) -> Study:
    """Compare schemes of quantization on a model that reads a text.

    The model reads the text once as it is, to record keys, values and queries. Then it reads it once for each
    scheme, with all keys and values encoded and decoded before attention sees them, recent tokens too.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model on the CPU, whose layers have heads of one number and size.
    ids : sequence of int
        The tokens of the text, two or more.
    schemes : str or sequence
        As `kvkit.tools.study` takes them.
    progress : callable, optional
        Called with the number of readings done and the number of all.

    Returns
    -------
    Study
        Its summary has perplexity and agreement besides.

    Raises
    ------
    KvkitError
        If a scheme is unknown or does not fit, or if the model's attention is not transformers' interface.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from kvkit.integrations.transformers import study
    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_hidden_layers=2, **sizes)).eval()
    >>> found = study(model, range(50), "float32,int4:g8")
    >>> found.summary[0].agreement
    1.0
    """
    chosen = list_schemes(schemes)
    if len(ids) < 2:
        raise argument_error("ids", "two tokens or more", len(ids))
    total = len(chosen) + 1
    seen = {}

    def record(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen[layer] = query[:, :, -QUERIES:], key, value
        return key, value

    def done(count: int) -> None:
        if progress:
            progress(count, total)

    own = read_text(model, ids, record)
    done(1)
    comparison = study_layers(Lazy(open_cache, arrays_of(seen)), Lazy(list, chosen))
    summary = []
    for number, ((_, *sides), row) in enumerate(zip(chosen, comparison.summary, strict=True), 2):
        coded = read_text(model, ids, through(*sides))
        agreement = float((coded.best == own.best).mean())
        summary.append(replace(row, perplexity=coded.perplexity, agreement=agreement))
        done(number)
    note = f"perplexity of the model as it is: {own.perplexity:.2f}, over {len(ids) - 1} tokens"
    return replace(comparison, source=type(model).__name__, summary=summary, notes=(*comparison.notes, note))


@dataclass
class TextReading:
    """The predictions of a model for a text."""

    best: np.ndarray  # the token that it found most likely, after each one but the last
    perplexity: float  # of those that came


def read_text(model: Any, ids: Sequence[int], between: Callable[..., Any]) -> TextReading:
    """Read a text. `between(layer, query, key, value)` returns the keys and values that attention sees."""
    tokens = torch.tensor([list(ids)])
    with attending(model, between), torch.inference_mode():
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[0].double()
    loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:])
    return TextReading(logits.argmax(1).numpy(), float(loss.exp()))


@contextmanager
def attending(model: Any, between: Callable[..., Any]) -> Iterator[None]:
    """Let a model attend with kvkit, to the keys and values that `between` returns."""
    before, seen = model.config._attn_implementation, []

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        seen.append(module)
        return attention_forward(
            module, query, *between(module.layer_idx, query, key, value), *args, **kwargs
        )

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
    if not seen:
        raise argument_error("model", "one with transformers' attention interface", type(model).__name__)


def arrays_of(seen: dict[int, Any]) -> dict[str, np.ndarray]:
    """Return recorded queries, keys and values by name, as `kvkit.tools.study` takes them."""
    layers = [[to_numpy("states", states)[0].swapaxes(0, 1) for states in seen[i]] for i in sorted(seen)]
    query, key, value = zip(*layers, strict=True)
    if len({(one.shape, other.shape) for one, other in zip(key, value, strict=True)}) > 1:
        raise argument_error("model", "layers whose heads are alike", "several numbers or sizes")
    return {"query": np.stack(query)[:, None], "key": np.stack(key), "value": np.stack(value)}


def through(*schemes: Any) -> Callable[..., Any]:
    """Return a function that encodes and decodes keys and values, each by its scheme."""

    def coded(scheme: Any, states: torch.Tensor) -> torch.Tensor:
        x = np.ascontiguousarray(to_numpy("states", states)[0].swapaxes(0, 1), np.float32)
        decoded = np.asarray(scheme.decode(scheme.encode(x)), np.float32)
        return tensor_of(decoded.swapaxes(0, 1)[None]).to(states.dtype)

    def between(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(coded(*pair) for pair in zip(schemes, (key, value), strict=True))

    return between
