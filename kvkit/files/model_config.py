"""Read the cache sizes of a model's layers from transformers' config.json or the header of a GGUF file."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvkit.errors import KvkitError, argument_error, brief
from kvkit.files.file_kinds import kind_of_file

KINDS = "full", "sliding", "latent", "index", "recurrent", "shared"
KIND_OF_TYPE = {  # {layer type of transformers: kind of layer; "" stores nothing}
    "full_attention": "full", "attention": "full", "sliding_attention": "sliding",
    "chunked_attention": "sliding", "linear_attention": "recurrent", "mamba": "recurrent",
    "mamba2": "recurrent", "conv": "recurrent", "moe": "", "mlp": "",
}  # fmt: skip
# {model: n}. Every n-th layer is full and the others slide, which configurations need not say.
FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "gpt-oss": 2}
GGUF_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
                12: "<d"}  # fmt: skip
GGUF_TEXT, GGUF_ARRAY = 8, 9
# Architectures of GGUF files (llama.cpp's rope types) by the pairs that rotary embedding rotates: neighbours,
# or elements at the same place of the two halves of a head.
NEIGHBOURS = frozenset(
    """
    llama llama4 mllama deci baichuan starcoder internlm2 minicpm xverse command-r cohere2 olmo arctic
    deepseek deepseek2 deepseek32 plm chatglm granite granitemoe granitehybrid chameleon bailingmoe neo-
    bert smollm3 arcee ernie4_5 ernie4_5-moe mistral3 mistral4 maincoder glm-dsa
    """.split()  # noqa: SIM905
)
HALVES = frozenset(
    """
    falcon falcon-h1 grok dbrx stablelm bitnet qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3next
    qwen3vl qwen3vlmoe qwen35 qwen35moe olmo2 olmoe phi2 phi3 phimoe gemma gemma2 gemma3 gemma3n gemma4
    starcoder2 openelm gptneox codeshell nemotron exaone exaone4 minicpm3 gpt-oss lfm2 lfm2moe
    smallthinker seed_oss hunyuan-dense hunyuan-moe dots1 bailingmoe2 apertus minimax-m2 glm4moe
    """.split()  # noqa: SIM905
)
MOST = 2**20  # the most entries of an array, or characters of a text, in a GGUF header


@dataclass(frozen=True)
class LayerShape:
    """Holds the sizes of one layer's cache: rows of keys and values for each token, or a state.

    Attributes
    ----------
    kind : str
        One of `KINDS`: "full" and "sliding" attention; "latent" has one row for keys and values (MLA);
        "index" has the keys that choose tokens for sparse attention; "recurrent" has a state and no tokens;
        "shared" reads another layer's cache.
    heads, key_dim, value_dim : int
        Key heads, and elements of a key and of a value.
    window : int or None
        How many tokens a sliding layer attends to.
    state : int
        How many numbers the state of a sequence has.
    """

    kind: str
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    state: int = 0


@dataclass(frozen=True)
class ModelShape:
    """Holds the cache sizes of a model's layers, and its rotary embedding."""

    name: str
    layers: tuple[LayerShape, ...]
    longest: int  # the longest context that the model was trained for, 0 if unknown
    numbers: tuple[int, ...] = ()  # for each of `layers`, its number in the model, where some store nothing
    rope_base: float | None = None
    rope_pairs: str | None = None  # "halves" or "interleaved"
    rope_dim: int | None = None  # how many elements of a head rotate
    sliding_rope_base: float | None = None


def read_model(model: Any) -> ModelShape:
    """Read a config.json, a folder with one, a GGUF file, or a configuration in memory."""
    if hasattr(model, "to_dict"):
        model = model.to_dict()
    if isinstance(model, Mapping):
        return parse_config(model)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return parse_gguf(read_gguf(file))
            file.seek(0)
            config = json.load(file)
    except (ValueError, struct.error) as error:
        other = other_kind(path)
        why = f": it is {other} (kvkit inspect prints its sizes)" if other else f": {brief(error)}"
        raise KvkitError(f"{path}: neither a config.json nor a GGUF file{why}") from None
    if not isinstance(config, dict):
        raise KvkitError(f"{path}: expected a config.json, got {type(config).__name__}")
    return parse_config(config)


def other_kind(path: Path) -> str | None:
    """Return the kind of a file that `kvkit inspect` can read; None for other files."""
    with path.open("rb") as file:
        kind = kind_of_file(file)
        if kind is None and zipfile.is_zipfile(file):
            return "a .npz file or one of torch.save"
    return None if kind is None or kind[0].startswith("a GGUF") else kind[0]


def read_gguf(file: BinaryIO) -> dict[str, Any]:
    """Return the metadata of a GGUF file, from which the magic number (4 bytes) has been read."""

    def number(code: str) -> Any:
        return struct.unpack(code, file.read(struct.calcsize(code)))[0]

    def count() -> int:
        found = int(number("<Q"))
        if found > MOST:
            raise ValueError(f"a length of {found} in its header")
        return found

    def value(kind: int) -> Any:
        if kind == GGUF_TEXT:
            return file.read(count()).decode(errors="replace")
        if kind == GGUF_ARRAY:
            member = number("<I")
            return [value(member) for _ in range(count())]
        if kind not in GGUF_NUMBERS:
            raise ValueError(f"a value of type {kind} in its header")
        return number(GGUF_NUMBERS[kind])

    number("<I"), number("<Q")  # version, tensors
    return {value(GGUF_TEXT): value(number("<I")) for _ in range(count())}


def parse_gguf(fields: Mapping[str, Any]) -> ModelShape:
    """Return the layers that the metadata of a GGUF file describes."""
    architecture = str(fields.get("general.architecture"))
    found = {name.removeprefix(f"{architecture}."): x for name, x in fields.items()}
    count, heads = count_in(found, "block_count"), count_in(found, "attention.head_count", default=1)
    kv_heads = per_layer(found.get("attention.head_count_kv", heads), count)
    embedding = count_in(found, "embedding_length", default=0)
    dim = count_in(found, "attention.key_length", default=embedding // heads)
    values = count_in(found, "attention.value_length", default=dim)
    window, every = found.get("attention.sliding_window"), found.get("full_attention_interval")
    pattern = found.get("attention.sliding_window_pattern", FULL_EVERY.get(architecture, 0))
    inner, groups, depth = (
        count_in(found, f"ssm.{name}", default=0) for name in ("inner_size", "group_count", "state_size")
    )
    state = conv_state(found.get("ssm.conv_kernel", 1), inner + 2 * groups * depth) + inner * depth
    if "shortconv.l_cache" in found:  # LFM2
        state = conv_state(count_in(found, "shortconv.l_cache"), count_in(found, "embedding_length"))
    shared = count_in(found, "attention.shared_kv_layers", default=0)
    layers: list[LayerShape] = []
    numbers: list[int] = []
    for i in range(count):
        if i >= count - shared:
            layer = LayerShape("shared")
        elif not kv_heads[i] or (every and (i + 1) % every):
            if not state:  # a layer without a cache, such as an MLP
                continue
            layer = LayerShape("recurrent", state=state)
        elif "attention.key_length_mla" in found:
            layer = LayerShape("latent", 1, dim)
        elif window and slides(pattern, i):
            key_dim = count_in(found, "attention.key_length_swa", default=dim)
            value_dim = count_in(found, "attention.value_length_swa", default=values)
            layer = LayerShape("sliding", kv_heads[i], key_dim, value_dim, window)
        else:
            layer = LayerShape("full", kv_heads[i], dim, values)
        layers.append(layer)
        numbers.append(i)
    pairs = "interleaved" if architecture in NEIGHBOURS else "halves" if architecture in HALVES else None
    return ModelShape(
        str(fields.get("general.name", architecture)), tuple(layers), int(found.get("context_length", 0)),
        tuple(numbers), rope_base=found.get("rope.freq_base"), rope_pairs=pairs,
        rope_dim=found.get("rope.dimension_count"),
        sliding_rope_base=found.get("rope.freq_base_swa", 10000.0 if "gemma3" in architecture else None),
    )  # fmt: skip


def slides(pattern: Any, layer: int) -> bool:
    """Return whether a layer has a window, by a list of bools, or by n if every n-th layer has none."""
    if isinstance(pattern, Sequence):
        return bool(pattern[layer])
    return bool((layer + 1) % pattern) if pattern else True


def conv_state(kernel: int, channels: int) -> int:
    """Return how many numbers a causal convolution keeps: the last inputs of every channel."""
    return (kernel - 1) * channels


def per_layer(value: Any, count: int) -> list[int]:
    """Return a list with a number for each layer; `value` may be one number for all."""
    numbers = list(value) if isinstance(value, Sequence) else [value] * count
    if len(numbers) != count or not all(isinstance(number, int) for number in numbers):
        raise argument_error("heads", f"a number, or {count} of them", brief(value))
    return numbers


def count_in(fields: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first of these fields that is a number of at least 0; raise if there is no default."""
    for name in names:
        if isinstance(value := fields.get(name), int) and value >= 0:
            return value
    if default is None:
        raise argument_error(names[0], "a number in the configuration", brief(fields.get(names[0])))
    return default


def parse_config(config: Mapping[str, Any]) -> ModelShape:
    """Return the layers that a configuration of transformers describes."""
    name = str(config.get("_name_or_path") or config.get("model_type", "model"))
    parts = (config[part] for part in ("text_config", "llm_config", "language_config") if part in config)
    found = {**config, **next(parts, {})}
    count = count_in(found, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    kinds = kinds_of(found, count)
    shared = count_in(found, "num_kv_shared_layers", default=0)
    layers: list[LayerShape] = []
    numbers: list[int] = []
    for i, kind in enumerate(kinds):
        caches: list[LayerShape] = []  # of this layer
        if i >= count - shared:
            caches.append(LayerShape("shared"))
        elif kind == "recurrent":
            caches.append(LayerShape(kind, state=state_of(found)))
        elif kind and found.get("kv_lora_rank"):
            row = count_in(found, "kv_lora_rank") + count_in(found, "qk_rope_head_dim")
            caches.append(LayerShape("latent", 1, row))
            if found.get("index_head_dim"):
                caches.append(LayerShape("index", 1, count_in(found, "index_head_dim")))
        elif kind:
            caches.append(attention_of(found, kind, i, count))
        layers += caches
        numbers += [i] * len(caches)
    longest = count_in(found, "max_position_embeddings", "n_positions", default=0)
    rope = found.get("rope_parameters")
    base = (rope if isinstance(rope, dict) else found).get("rope_theta")
    fraction = found.get("partial_rotary_factor")
    dims = {layer.key_dim for layer in layers if layer.kind in ("full", "sliding")}
    return ModelShape(
        name, tuple(layers), longest, tuple(numbers),
        rope_base=base if isinstance(base, (int, float)) else None,
        rope_dim=int(min(dims) * fraction) if fraction and len(dims) == 1 else None,
    )  # fmt: skip


def kinds_of(found: Mapping[str, Any], count: int) -> list[str]:
    """Return the kind of each layer; "" if it stores nothing."""
    if "hybrid_override_pattern" in found:
        return [
            {"M": "recurrent", "*": "full"}.get(letter, "") for letter in found["hybrid_override_pattern"]
        ]
    if types := found.get("layer_types") or found.get("layers_block_type"):
        if unknown := sorted(set(types) - set(KIND_OF_TYPE)):
            wanted = f"types of {', '.join(KIND_OF_TYPE)}"
            raise argument_error("layer_types", wanted, ", ".join(map(str, unknown)))
        kinds = [KIND_OF_TYPE[kind] for kind in types]
    elif period := found.get("attn_layer_period"):
        offset = found.get("attn_layer_offset", 0)
        kinds = ["full" if i % period == offset else "recurrent" for i in range(count)]
    elif not found.get("sliding_window") or found.get("use_sliding_window") is False:
        kinds = ["full"] * count
    elif "max_window_layers" in found:
        kinds = ["sliding" if i >= found["max_window_layers"] else "full" for i in range(count)]
    else:
        model = str(found.get("model_type"))
        stated = found.get("sliding_window_pattern") or found.get("_sliding_window_pattern")
        pattern = stated or FULL_EVERY.get(model)
        kinds = ["sliding" if slides(pattern, i) else "full" for i in range(count)]
    if len(kinds) != count:
        raise argument_error("layer_types", f"{count} of them, as num_hidden_layers says", len(kinds))
    return kinds


def attention_of(found: Mapping[str, Any], kind: str, layer: int, count: int) -> LayerShape:
    """Return the sizes of an attention layer."""
    queries = count_in(found, "num_attention_heads", "n_head", "n_heads")
    head_names = ["num_key_value_heads", "num_kv_heads", "n_head_kv"]
    dim_names = ["head_dim", "kv_channels", "attention_head_dim"]
    if kind == "full" and found.get("global_head_dim"):  # Gemma 4
        head_names = ["num_global_key_value_heads", *head_names]
        dim_names = ["global_head_dim", *dim_names]
    heads = next((found[name] for name in head_names if found.get(name) is not None), queries)
    if found.get("multi_query") and not found.get("new_decoder_architecture"):
        heads = 1
    hidden = count_in(found, "hidden_size", "n_embd", "d_model", default=0)
    dim = count_in(found, *dim_names, default=hidden // queries)
    window = found.get("attention_chunk_size") if "sliding_window" not in found else found["sliding_window"]
    if kind == "sliding" and not window:
        raise argument_error("sliding_window", "a number, for layers that slide", brief(window))
    values = count_in(found, "v_head_dim", default=dim)
    heads_of_layer = per_layer(heads, count)[layer]
    return LayerShape(kind, heads_of_layer, dim, values, window if kind == "sliding" else None)


def state_of(found: Mapping[str, Any]) -> int:
    """Return how many numbers a recurrent layer stores for a sequence: convolution inputs and state."""
    if "linear_num_value_heads" in found:  # gated delta networks
        keys = count_in(found, "linear_num_key_heads") * (key_dim := count_in(found, "linear_key_head_dim"))
        values = count_in(found, "linear_num_value_heads") * count_in(found, "linear_value_head_dim")
        return conv_state(count_in(found, "linear_conv_kernel_dim"), 2 * keys + values) + values * key_dim
    hidden = count_in(found, "hidden_size")
    if "conv_L_cache" in found:  # LFM2
        return conv_state(count_in(found, "conv_L_cache"), hidden)
    depth = count_in(found, "mamba_d_state", "ssm_state_size")
    if heads := count_in(found, "mamba_n_heads", "mamba_num_heads", default=0):  # Mamba 2
        inner = heads * count_in(found, "mamba_d_head", "mamba_head_dim")
        groups = count_in(found, "mamba_n_groups", "n_groups")
    else:
        inner, groups = count_in(found, "mamba_expand") * hidden, 0
    kernel = count_in(found, "mamba_d_conv", "conv_kernel")
    return conv_state(kernel, inner + 2 * groups * depth) + inner * depth
