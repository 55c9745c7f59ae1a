"""Measure what quantization and eviction cost a model: its keys and values, its predictions for a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from kvkit.errors import KvkitError, argument_error
from kvkit.integrations.transformers.attention import attention_forward
from kvkit.integrations.transformers.bridge import to_numpy
from kvkit.integrations.transformers.masks import attention_mask
from kvkit.integrations.transformers.rotations import rotations_of
from kvkit.interop import numpy_to_tensor
from kvkit.tools.readers import CacheReader, open_cache
from kvkit.tools.studies.evicting import contexts_of, count_judging, kept_rows
from kvkit.tools.studies.measures import JUDGING
from kvkit.tools.studies.policies import StudyPlan, make_plan, make_target
from kvkit.tools.studies.schemes import list_schemes, of_layer
from kvkit.tools.studies.study import Study, study_layers
from kvkit.tools.tasks import Lazy

STUDY_NAME = "kvkit-study"


def study(
    model: Any,
    ids: Sequence[int],
    schemes: Any = None,
    *,
    evict: Any = None,
    budget: str = "uniform",
    judge: int | None = None,
    bits: float | None = None,
    error: float | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> Study:
    """Compare schemes of quantization, and policies that evict tokens, on a model that reads a text.

    The model first reads the text with unchanged keys and values, and these and the queries are recorded.
    Then it reads the text once for each scheme, with all keys and values, recent ones too, encoded and
    decoded before attention. With `evict` the last tokens measure the error: each policy or scheme changes
    the recorded keys and values of the tokens before, and the model reads on.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model on the CPU, whose layers have heads of one number and size.
    ids : sequence of int
        The tokens of the text, two or more.
    schemes : str or sequence
        As in `kvkit.tools.study`.
    evict, budget, judge
        As in `kvkit.tools.study`; by default the last quarter of the tokens measures the error with `evict`,
        `bits` or `error`.
    bits, error : float, optional
        As in `kvkit.tools.study`: find the best mix of the schemes. The last tokens, which `judge` counts,
        do not choose it, and only their predictions are counted.
    progress : callable, optional
        Called with (number of readings done, number of readings in all).

    Returns
    -------
    Study
        Its summary also has perplexity and agreement.

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
    target = make_target(bits, error)
    plan = make_plan(schemes, evict, budget, judge, rope_of(model) if evict else None, target=target)
    if len(ids) < 2:
        raise argument_error("ids", "two tokens or more", len(ids))
    inputs = len(ids) - 1  # the last token is only predicted
    judging_queries = count_judging(inputs, judge) if plan.holds_back else inputs
    first = inputs - judging_queries  # the first token whose prediction counts
    recorded = {}

    def record(layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        recorded[layer] = query if plan.holds_back else query[:, :, -JUDGING:], key, value
        return key, value

    def report(readings_done: int) -> None:
        if progress:
            progress(readings_done, 1 + len(plan.names) + (target is not None))

    unchanged = read_text(model, ids, attend_changed(record), skip=first)
    report(1)
    source = Lazy(open_cache, arrays_of(recorded))
    comparison = study_layers(source, Lazy(replace, plan))
    schemes = plan.schemes
    if comparison.mix is not None and comparison.mix.text not in plan.names:
        schemes = [*schemes, *list_schemes([comparison.mix.text])]
    if plan.policies:
        check_windows(model, inputs)
        readings = read_on(model, ids, first, source.value, plan)
    else:
        changes = (coding(source.value.count, *sides) for _, *sides in schemes)
        readings = ([read_text(model, ids, attend_changed(change), skip=first)] for change in changes)
    summary = []
    for readings_done, (row, of_seeds) in enumerate(zip(comparison.summary, readings, strict=True), 2):
        agreement = float(np.mean([(each.best == unchanged.best).mean() for each in of_seeds]))
        perplexity = float(np.mean([each.perplexity for each in of_seeds]))
        summary.append(replace(row, perplexity=perplexity, agreement=agreement))
        report(readings_done)
    note = f"perplexity of the model as it is: {unchanged.perplexity:.2f}, over {judging_queries} tokens"
    return replace(comparison, source=type(model).__name__, summary=summary, notes=(*comparison.notes, note))


def rope_of(model: Any) -> Any:
    """Return how a model rotates its keys; None if that is unknown or layers differ."""
    try:
        rotations = rotations_of(model.config)
    except KvkitError:
        return None
    return rotations[0] if all(each == rotations[0] for each in rotations) else None


def check_windows(model: Any, tokens: int) -> None:
    """Raise if a layer's window has fewer tokens than the text."""
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    window = getattr(config, "sliding_window", None)
    if window is not None and window < tokens and "sliding_attention" in kinds:
        raise argument_error("model", f"no window, which evicts already, or up to {window} tokens", tokens)


def read_on(
    model: Any, ids: Sequence[int], first: int, source: CacheReader, plan: StudyPlan
) -> Iterator[Any]:
    """Yield for each scheme or policy the readings of the text after the token `first`, one for each seed."""
    kept: dict[str, list[list[Any]]] = {}  # {policy: [seed][layer] groups: key heads with their rows}
    for i in range(source.count):
        contexts = list(contexts_of(source.layer(i), plan.judge))
        for policies in plan.groups():
            seeds: dict[str, int] = {}
            for policy, (groups,) in kept_rows(contexts, policies, plan, (i, source.count)):
                seed = seeds[policy.name] = seeds.get(policy.name, -1) + 1
                of_seeds = kept.setdefault(policy.name, [])
                if seed == len(of_seeds):
                    of_seeds.append([])
                of_seeds[seed].append(groups)
    layer = source.layer(0)
    all_rows = [(slice(0, layer.key.heads), np.tile(np.arange(layer.key.tokens), (layer.key.heads, 1)))]
    sides = {name: both for name, *both in plan.schemes} | {each.name: each.schemes for each in plan.policies}
    for name in plan.names:
        of_seeds = kept.get(name, [[all_rows] * source.count])
        forwards = [attend_kept(source, layers, sides[name], first) for layers in of_seeds]
        yield [read_text(model, ids, forward, begin=first) for forward in forwards]


def attend_kept(source: CacheReader, layers: Sequence[Any], schemes: Any, first: int) -> Callable[..., Any]:
    """Return attention to kept rows before the token `first` and to new tokens, all encoded and decoded.

    `layers` has groups for each layer: key heads, and their rows [heads, tokens] with those of new tokens.
    """

    def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer, results = source.layer(module.layer_idx), []
        queries_per_key = query.shape[1] // key.shape[1]
        sinks = kwargs.pop("s_aux", None)
        for heads, rows in layers[module.layer_idx]:
            past_rows, states = rows[:, : rows.shape[1] - key.shape[2]].T, []  # [tokens, heads]
            own_schemes = of_layer(schemes, module.layer_idx, source.count)
            for scheme, side, new in zip(own_schemes, (layer.key, layer.value), (key, value), strict=True):
                past = np.take_along_axis(side.read(slice(0, first))[:, heads], past_rows[..., None], 0)
                x = np.concatenate((past, to_numpy("states", new)[0, heads].swapaxes(0, 1)))
                states.append(encode_and_decode(scheme, x).to(key.dtype))
            query_heads = slice(heads.start * queries_per_key, heads.stop * queries_per_key)
            own = {} if sinks is None else {"s_aux": sinks[query_heads]}
            attended = attention_forward(module, query[:, query_heads], *states, *args, **kwargs, **own)
            results.append(attended[0])
        return torch.cat(results, 2), None

    return forward


@dataclass
class TextReading:
    """Holds a model's predictions for a text."""

    best: np.ndarray  # the most likely next token after each token but the last
    perplexity: float  # of the tokens of the text


def read_text(
    model: Any, ids: Sequence[int], forward: Callable[..., Any], *, begin: int = 0, skip: int = 0
) -> TextReading:
    """Read a text from the token `begin` on with the attention `forward`; skip the first predictions."""
    tokens = torch.tensor([list(ids)])[:, begin:]
    positions = {"position_ids": torch.arange(begin, len(ids) - 1)[None]} if begin else {}
    with attending(model, forward), torch.inference_mode():
        logits = model(input_ids=tokens[:, :-1], use_cache=False, **positions).logits[0, skip:].double()
    loss = torch.nn.functional.cross_entropy(logits, tokens[0, skip + 1 :])
    return TextReading(logits.argmax(1).numpy(), float(loss.exp()))


@contextmanager
def attending(model: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Make a model use a function of transformers' attention interface; raise if it does not call it."""
    before, called = model.config._attn_implementation, []

    def record_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(module)
        return forward(module, *args, **kwargs)

    AttentionInterface.register(STUDY_NAME, record_call)
    AttentionMaskInterface.register(STUDY_NAME, attention_mask)
    model.set_attn_implementation(STUDY_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
    if not called:
        raise argument_error("model", "one with transformers' attention interface", type(model).__name__)


def attend_changed(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return attention to the keys and values that `change(layer, query, key, value)` returns."""

    def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        states = change(module.layer_idx, query, key, value)
        return attention_forward(module, query, *states, *args, **kwargs)

    return forward


def arrays_of(recorded: dict[int, Any]) -> dict[str, np.ndarray]:
    """Return recorded queries, keys and values by name, as `kvkit.tools.study` takes them."""
    layers = [[to_numpy("states", x)[0].swapaxes(0, 1) for x in recorded[i]] for i in sorted(recorded)]
    query, key, value = zip(*layers, strict=True)
    if len({(own.shape, of_value.shape) for own, of_value in zip(key, value, strict=True)}) > 1:
        raise argument_error("model", "layers whose heads are alike", "several numbers or sizes")
    return {"query": np.stack(query)[:, None], "key": np.stack(key), "value": np.stack(value)}


def encode_and_decode(scheme: Any, x: np.ndarray) -> Tensor:
    """Encode and decode numbers [tokens, heads, dim] by a scheme; return them as [1, heads, tokens, dim]."""
    x = np.ascontiguousarray(x, np.float32)
    return numpy_to_tensor(np.asarray(scheme.decode(scheme.encode(x)), np.float32).swapaxes(0, 1)[None])


def coding(layers: int, *schemes: Any) -> Callable[..., Any]:
    """Return a function for `attend_changed` that encodes and decodes keys and values by their schemes."""

    def change(layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            encode_and_decode(scheme, to_numpy("states", states)[0].swapaxes(0, 1)).to(states.dtype)
            for scheme, states in zip(of_layer(schemes, layer, layers), (key, value), strict=True)
        )

    return change
