"""Find the kind of each layer of a model: by lists, patterns and intervals, which must agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from kvkit.models.words import MOST_LAYERS, Words, shown
from kvkit.typed import Method

# {name of a layer's type: its kind}. "indexed" is attention with index keys, "csa" and "hca" are V4's.
KIND_OF_TYPE = {
    "full_attention": "full", "attention": "full", "sliding_attention": "window",
    "chunked_attention": "chunk", "linear_attention": "state", "mamba": "state", "mamba2": "state",
    "recurrent": "state", "conv": "conv", "mlp": "none", "moe": "none", "indexed_attention": "indexed",
    "deepseek_sparse_attention": "indexed", "qwen_sparse_attention": "indexed",
    "minimax_m3_sparse": "indexed", "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca", "hybrid": "both", "hybrid_sliding": "both_window",
}  # fmt: skip
TYPE_OF_KIND = {kind: name for name, kind in reversed(KIND_OF_TYPE.items())} | {
    "v4_window": "sliding_attention"
}
KIND_OF_LETTER = {"M": "state", "*": "full", "-": "none", "E": "none"}
RATIOS = {0: "window", 4: "csa", 128: "hca"}
LISTED = "layer_types", "layers_block_type"

# Models whose layers have a window but each n-th: {model_type: n}
EVERY = {
    "gemma2": 2, "vaultgemma": 2, "gpt_oss": 2, "gpt-oss": 2, "gemma3": 6, "gemma3_text": 6, "gemma3n": 5,
    "gemma3n_text": 5, "gemma4": 6, "gemma4_text": 6, "gemma4_unified_text": 6, "cohere2": 4, "exaone4": 4,
    "exaone4_5_text": 4, "exaone_moe": 4, "olmo3": 4, "kolibri1": 5, "beam": 6, "cohere2_moe": 4,
}  # fmt: skip
LAST_IS_FULL = {"gemma4", "gemma4_text", "gemma4_unified_text", "beam", "diffusion_gemma_text"}
# The first layer and each n-th after it are full.
EVERY_FROM_FIRST = {"cwm": 4, "granite_swa": 4, "granitemoe_swa": 4, "modernbert": 3, "modernbert-decoder": 3}
INTERVAL = {  # {model_type: its interval of full layers, which configurations need not state}
    "qwen3_next": 4, "qwen3next": 4, "qwen3_5": 4, "qwen3_5_text": 4, "qwen3_5_moe": 4, "qwen3_5_moe_text": 4,
    "qwen35": 4, "qwen35moe": 4,
}  # fmt: skip
ALIKE = {"falcon_h1": "both", "mamba": "state", "mamba2": "state", "falcon_mamba": "state"}
INDEXED = {"deepseek_v32", "axk2", "hy_v4", "mistral_large4_text", "mistral_large4", "glm_moe_dsa"}
# Models with layers of several kinds, which their configuration must list.
NEED_A_LIST = set(
    """
    minimax minimax_text_01 minimax_m3_vl_text granitemoehybrid kimi_linear lfm2 lfm2_moe lfm3 olmo_hybrid
    bamba jamba zamba zamba2 nemotron_h recurrent_gemma deepseek_v4 bailing_hybrid qwen4_exp
    qwen4_exp_text glm5_next glm5_next_text flint dots3_note_text dots3_note inkling_text inkling_mm_model
    inkling2_text mimo_v2 mimo_v2_flash laguna mellum cohere_compass_text
    """.split()  # noqa: SIM905
)
UNREADABLE = {"rwkv", "rwkv5", "xlstm", "reformer", "blt", "zaya", "xlnet", "transfo-xl", "retnet"}
STATED = "a model whose layers kvkit can read"
# {an entry of configurations: f(words, entry, layers) -> the kinds of layers, None if it says nothing}; where
# two entries give a layer different kinds, an error names the earlier one
SOURCES: dict[str, Callable[[Words, str, int], list[str] | None]] = {}


def entry(*names: str) -> Callable[[Method], Method]:
    """Return a decorator of the function that reads the kinds of layers from entries of these names."""

    def register(read: Method) -> Method:
        SOURCES.update(dict.fromkeys(names, cast(Any, read)))
        return read

    return register


@dataclass(frozen=True)
class LayerType:
    """Names the kind of a layer, and its type as rope_parameters call it."""

    kind: str
    name: str


def layer_count(words: Words) -> int:
    """Return the number of a model's layers, without those of drafts."""
    pairs = words.model_type == "longcat_flash" and "num_hidden_layers" not in words  # two in each layer
    names: tuple[str, ...] = ("num_hidden_layers", "n_layer", "n_layers")
    if words.model_type != "longcat_flash" or pairs:
        names = (*names, "num_layers")
    listed = next((name for name in (*LISTED, "hybrid_override_pattern") if name in words), "")
    if listed and not any(name in words for name in names):
        value = words.entries[listed]
        count = len(value) if isinstance(value, (list, tuple, str)) else 0
    else:
        count = words.count(*names, least=1)
    if not 0 < count <= MOST_LAYERS:
        raise words.error(words.name_of(names), f"at most {MOST_LAYERS} layers", count)
    return 2 * count if pairs else count


def layer_kinds(words: Words, count: int) -> list[LayerType]:
    """Return the kind of each layer. Entries that disagree are an error that names two."""
    if words.model_type in UNREADABLE or words.flag("is_encoder_decoder", False):
        other = "an encoder-decoder" if words.model_type not in UNREADABLE else repr(words.model_type)
        raise words.error("model_type", STATED, other)
    if "cross_attention_layers" in words:
        wanted = "a model whose layers read no picture: their rows do not depend on the text"
        raise words.error("cross_attention_layers", wanted, shown(words.value("cross_attention_layers")))
    found: dict[str, list[str]] = {}
    for name, read in SOURCES.items():
        if name in words:
            one = read(words, name, count)
            if one is not None:
                found[name] = with_full_end(words, one)
    if not found:
        found["model_type"] = with_full_end(words, kinds_by_model(words, count))
    first, *others = found
    for other in others:
        compare(words, found, first, other)
    kinds = found[first]
    check_windows(words, kinds)
    listed = next((name for name in LISTED if name in words), None)
    names = [] if listed is None else words.by_layer(listed, count, drafts(words)) or []
    names = names or [TYPE_OF_KIND[kind] for kind in kinds]
    return [
        LayerType(kind, name if KIND_OF_TYPE[name] == kind else TYPE_OF_KIND[kind])
        for kind, name in zip(kinds, names, strict=True)
    ]


def check_windows(words: Words, kinds: list[str]) -> None:
    """Raise if layers have a window although the configuration says that none has one."""
    if "use_sliding_window" in words and not has_window(words) and "window" in kinds:
        wanted = f"true, or no {TYPE_OF_KIND['window']} in layer {kinds.index('window')}"
        raise words.error("use_sliding_window", wanted, shown(words.value("use_sliding_window")))
    if words.count("max_window_layers", default=0) >= len(kinds):
        words.use("sliding_window")
    if "both" in kinds:
        words.use("num_mem_blocks")


def with_full_end(words: Words, kinds: list[str]) -> list[str]:
    """Return the kinds of layers of a model whose last layer has no window, whatever its list says."""
    ends = words.model_type in LAST_IS_FULL and kinds[-1] == "window"
    return [*kinds[:-1], "full"] if ends else kinds


def compare(words: Words, found: dict[str, list[str]], first: str, other: str) -> None:
    """Raise if two entries give a layer different kinds."""
    coarse = {"indexed": "full", "conv": "state", "both_window": "both"}
    for i, kinds in enumerate(zip(found[first], found[other], strict=True)):
        one, two = (coarse.get(kind, kind) for kind in kinds)
        if one != two:
            raise words.error(other, f"{kinds[0]} in layer {i}, as {first} says", kinds[1])


def drafts(words: Words) -> int:
    """Return how many layers of drafts follow those of the model in lists."""
    return words.count("num_nextn_predict_layers", "num_mtp_layers", default=0)


@entry(*LISTED)
def listed_kinds(words: Words, name: str, count: int) -> list[str]:
    """Read a list of types by name."""
    types = words.by_layer(name, count, drafts(words)) or []
    for i, each in enumerate(types):
        if not isinstance(each, str) or each not in KIND_OF_TYPE:
            raise words.error(f"{name}[{i}]", f"a type of {', '.join(KIND_OF_TYPE)}", shown(each))
    kinds = [KIND_OF_TYPE[each] for each in types]
    if words.model_type == "deepseek_v4":  # its windows lie beside compressed rows of other layers
        return ["v4_window" if kind == "window" else kind for kind in kinds]
    return kinds


@entry("hybrid_override_pattern")
def letters(words: Words, name: str, count: int) -> list[str]:
    """Read a text with a letter for each layer."""
    text = words.value(name)
    if not isinstance(text, str) or set(text) - set(KIND_OF_LETTER):
        raise words.error(name, f"a text of {' '.join(KIND_OF_LETTER)}", shown(text))
    if len(text) != count:
        raise words.error(name, f"{count} letters, one for each layer", len(text))
    return [KIND_OF_LETTER[letter] for letter in text]


@entry("hybrid_layer_pattern")
def hybrid_layer_pattern(words: Words, name: str, count: int) -> list[str]:
    """Read MiMo's list, 1 for a window, or Megatron's letters."""
    read = letters if isinstance(words.entries[name], str) else flagged("window", "full")
    return read(words, name, count)


def flagged(chosen: str, rest: str) -> Callable[[Words, str, int], list[str]]:
    """Return a reader of a list that has 1 for layers of one kind, and 0 for the others."""
    return lambda words, name, count: [chosen if flag else rest for flag in bits(words, name, count)]


def bits(words: Words, name: str, count: int) -> list[int]:
    """Read a list with 0 or 1 for each layer."""
    members = words.by_layer(name, count, drafts(words)) or []
    for i, each in enumerate(members):
        if each not in (0, 1):
            raise words.error(f"{name}[{i}]", "0 or 1", shown(each))
    return [int(each) for each in members]


@entry("block_types", "_block_types")
def block_types(words: Words, name: str, count: int) -> list[str]:
    """Read RecurrentGemma's types, which repeat; its attention has a window."""
    kinds = {"recurrent": "state", "attention": "window"}
    members = words.items(name) or []
    if not members or any(not isinstance(each, str) or each not in kinds for each in members):
        raise words.error(name, f"a list of {' and '.join(kinds)}", shown(words.value(name)))
    return [kinds[members[i % len(members)]] for i in range(count)]


@entry("full_attention_interval", "layer_group_size")
def interval(words: Words, name: str, count: int) -> list[str]:
    """Read n of models in which each n-th layer is full and the others have states."""
    step = words.count(name, least=1)
    return ["state" if (i + 1) % step else "full" for i in range(count)]


@entry("linear_attn_config")
def linear_attn_config(words: Words, name: str, count: int) -> list[str] | None:
    """Read Kimi's lists of layers, which are numbered from 1."""
    if not states(words, name, "full_attn_layers", "kda_layers"):
        return None
    part = words.part(name)
    full, state = (part.indices(each, count, 1) or set() for each in ("full_attn_layers", "kda_layers"))
    if full & state or len(full | state) != count:
        wanted = f"each of {count} layers in one of full_attn_layers and kda_layers"
        raise words.error(name, wanted, f"{len(full)} and {len(state)}")
    return ["full" if i in full else "state" for i in range(count)]


def states(words: Words, name: str, *names: str) -> bool:
    """Return whether a nested mapping has one of some entries. What is no mapping is refused later."""
    value = words.entries[name]
    return not isinstance(value, Mapping) or any(value.get(each) is not None for each in names)


def numbered(chosen: str, rest: str) -> Callable[[Words, str, int], list[str]]:
    """Return a reader of a list of layers, from 0, whose kind the others do not have."""

    def read(words: Words, name: str, count: int) -> list[str]:
        layers = words.indices(name, count) or set()
        return [chosen if i in layers else rest for i in range(count)]

    return read


entry("attn_layer_indices")(numbered("full", "state"))
entry("full_attn_idxs")(numbered("full", "conv"))
entry("local_layer_ids")(numbered("both_window", "both"))


@entry("attn_layer_period")
def attn_layer_period(words: Words, name: str, count: int) -> list[str]:
    """Read Jamba's period and offset of attention; Zamba counts from its third layer."""
    period, offset = words.count(name, least=1), words.count("attn_layer_offset", default=0)
    if offset >= period:
        raise words.error("attn_layer_offset", f"a number below attn_layer_period, {period}", offset)
    if words.model_type == "zamba":
        head = ["state", "state", "both"]
        tail = ["both" if i % period == offset else "state" for i in range(max(count - 3, 0))]
        return (head + tail)[:count]
    return ["full" if i % period == offset else "state" for i in range(count)]


entry("attn_type_list")(flagged("full", "state"))


@entry("block_configs")
def block_configs(words: Words, name: str, count: int) -> list[str]:
    """Read Nemotron-NAS's blocks, some of which have no attention."""
    kinds = []
    for i, block in enumerate(words.by_layer(name, count) or []):
        part = Words({"block": block}, path=f"{name}[{i}].").part("block").part("attention")
        off = part.flag("no_op", False) or part.flag("replace_with_linear", False)
        kinds.append("none" if off else "full")
    return kinds


entry("hybrid_layer_ids")(numbered("both", "state"))


@entry("compress_ratios")
def compress_ratios(words: Words, name: str, count: int) -> list[str]:
    """Read DeepSeek V4's ratios; further members belong to layers of drafts."""
    if words.model_type != "deepseek_v4":
        raise words.error(name, "a model of type deepseek_v4", repr(words.model_type))
    ratios = words.items(name) or []
    if len(ratios) < count:
        raise words.error(name, f"{count} ratios, one for each layer", len(ratios))
    for i, ratio in enumerate(ratios[:count]):
        if isinstance(ratio, bool) or not isinstance(ratio, int) or ratio not in RATIOS:
            raise words.error(f"{name}[{i}]", "0, 4 or 128", shown(ratio))
    words.use("num_nextn_predict_layers")
    return ["v4_window" if RATIOS[ratio] == "window" else RATIOS[ratio] for ratio in ratios[:count]]


@entry("sliding_window_pattern", "_sliding_window_pattern")
def sliding_window_pattern(words: Words, name: str, count: int) -> list[str] | None:
    """Read n, where each n-th layer is full, or a text such as LLLG, which repeats."""
    pattern = words.value(name)
    if not has_window(words):
        return ["full"] * count
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise words.error(name, "a number, or a text of L and G", shown(pattern))
        return ["window" if pattern[i % len(pattern)] == "L" else "full" for i in range(count)]
    step = words.whole(name, pattern, 0)
    if words.model_type == "cohere2_moe":  # its first layers have a pattern of their own
        first = words.count("first_k_dense_replace", default=0)
        own = words.count("prefix_dense_sliding_window_pattern", default=1, least=1)
        numbers = [(i, own) if i < first else (i - first, max(step, 1)) for i in range(count)]
        return ["window" if (i + 1) % n else "full" for i, n in numbers]
    return ["window" if step and (i + 1) % step else "full" for i in range(count)]


@entry("global_attn_every_n_layers")
def global_attn_every_n_layers(words: Words, name: str, count: int) -> list[str]:
    """Read n, where each n-th layer is full: ModernBERT counts from the first, AFMoE from the n-th."""
    step, first = words.count(name, least=1), words.model_type != "afmoe"
    return ["window" if (i if first else i + 1) % step else "full" for i in range(count)]


@entry("no_rope_layers", "no_rope_layer_interval")
def no_rope_layers(words: Words, name: str, count: int) -> list[str] | None:
    """Read which layers of Llama 4 attend within chunks: those that rotate keys."""
    if not words.model_type.startswith("llama4"):
        return None
    rotating = rotating_layers(words, count)
    return ["chunk" if rotates else "full" for rotates in rotating]


def rotating_layers(words: Words, count: int) -> list[int]:
    """Return 1 for each layer that rotates keys, by no_rope_layers; an empty list means by interval."""
    if words.items("no_rope_layers"):
        return bits(words, "no_rope_layers", count)
    step = words.count("no_rope_layer_interval", default=4, least=1)
    return [int((i + 1) % step != 0) for i in range(count)]


@entry("sparse_attention_config")
def sparse_attention_config(words: Words, name: str, count: int) -> list[str] | None:
    """Read which layers of MiniMax M3 have index keys."""
    if not states(words, name, "sparse_attention_freq"):
        return None
    part = words.part(name)
    return ["indexed" if flag else "full" for flag in bits(part, "sparse_attention_freq", count)]


def has_window(words: Words) -> bool:
    """Return whether the configuration gives layers a window: it may say 0, false or nothing."""
    off_unless_said = words.model_type.startswith(("qwen2", "qwen3", "smollm3"))
    uses = words.flag("use_sliding_window", not off_unless_said)
    words.use("max_window_layers")
    if not uses:
        words.use("sliding_window")
        return False
    return any(words.entries.get(name) for name in ("sliding_window", "sliding_window_size"))


def kinds_by_model(words: Words, count: int) -> list[str]:
    """Return the kinds of a model whose configuration has no list of layers."""
    model = words.model_type
    if model in NEED_A_LIST or model.startswith("inkling"):
        raise words.error("layer_types", f"the type of each layer of a model of type {model}", "none")
    if model in ALIKE:
        return [ALIKE[model]] * count
    if model in INTERVAL:
        return ["state" if (i + 1) % INTERVAL[model] else "full" for i in range(count)]
    if model in INDEXED:
        return ["indexed"] * count
    windows = EVERY | EVERY_FROM_FIRST
    if model in windows and not {"sliding_window", "local_attention"} & words.stated:
        raise words.error("sliding_window", f"the window of a model of type {model}, or null", "none")
    local = "local_attention" in words and model.startswith("modernbert")
    if not has_window(words) and not local:
        return ["full"] * count
    if model in windows:
        shift = model in EVERY
        return ["window" if (i + shift) % windows[model] else "full" for i in range(count)]
    first = words.count("max_window_layers", default=0)
    return ["window" if i >= first else "full" for i in range(count)]


def own_index_keys(words: Words, count: int) -> list[bool]:
    """Return which layers with sparse attention choose rows by index keys of their own."""
    pattern = words.value("index_topk_pattern")
    names: dict[object, bool] = {"full": True, "shared": False, "F": True, "S": False}
    types = words.by_layer("indexer_types", count, drafts(words))
    if pattern is not None:
        members = list(pattern) if isinstance(pattern, (str, list, tuple)) else []
        if len(members) < count or any(not isinstance(each, str) or each not in names for each in members):
            raise words.error("index_topk_pattern", f"F or S for each of {count} layers", shown(pattern))
        types = types or members[:count]
    step = words.count("index_topk_freq", default=1, least=1)
    offset = words.count("index_skip_topk_offset", default=2)
    if types is None:
        return [max(i - offset + 1, 0) % step == 0 for i in range(count)]
    for i, each in enumerate(types):
        if not isinstance(each, str) or each not in names:
            raise words.error(f"indexer_types[{i}]", "full or shared", shown(each))
    return [names[each] for each in types]


def shared_sources(words: Words, types: list[LayerType]) -> list[int | None]:
    """Return for each layer the one whose rows it reads, or None if it has rows of its own."""
    count = len(types)
    sources: list[int | None] = [None] * count
    shared = words.count("num_kv_shared_layers", default=0)
    if shared > count - 1 and shared:
        raise words.error(
            "num_kv_shared_layers", f"a number below {count}, as many layers as there are", shared
        )
    for i in range(count - shared, count):
        alike = [j for j in range(count - shared) if types[j].kind == types[i].kind]
        if not alike:
            wanted = f"an earlier layer of type {types[i].name} for layer {i} to read"
            raise words.error("num_kv_shared_layers", wanted, shared)
        sources[i] = alike[-1]
    for i, source in enumerate(words.by_layer("kv_source_layers", count) or []):
        source = words.whole(f"kv_source_layers[{i}]", source)
        if source > i:
            raise words.error(f"kv_source_layers[{i}]", f"a layer up to {i}", source)
        sources[i] = None if source == i else source
    return sources
