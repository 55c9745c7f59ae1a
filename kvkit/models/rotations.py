"""Find how each layer rotates its keys: base, scaling, rotated elements, and the layers that do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvkit.models.description import RopeWords
from kvkit.models.kinds import LayerType, drafts, rotating_layers
from kvkit.models.sizes import QUERIES, changes_of, head_dim
from kvkit.models.words import ROPE_WORDS, Words, shown

NO_ROTATION = "none"
ROTATES = "a config that shows how keys are rotated (else describe it with kvkit.Rope)"

# What configurations do not say, by their `model_type`, as the models of transformers do it
# A pair of rotated elements is two neighbours.
NEIGHBOURS = {
    *(
        "blt",
        "codegen",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "ernie4_5",
        "ernie4_5_moe",
        "ernie4_5_vl_moe_text",
    ),
    *("glm", "glm4", "glm4v_text", "glm_ocr_text", "gptj", "helium", "llama4_text", "llama4", "moonshine"),
    "moonshine_streaming",
}
# The same in latent models, whose rotated elements follow the latent vector in a row.
LATENT_NEIGHBOURS = {
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2"),
    *("kimi_k25", "longcat_flash", "mistral4", "youtu", "axk1"),
}
LATENT_HALVES = {"minicpm3"}
# Only layers with a window rotate keys. In a model without a window all do (True), or none does (False).
WINDOWS_ROTATE = dict.fromkeys(("afmoe", "cohere2", "flint"), False)
WINDOWS_ROTATE |= dict.fromkeys(("exaone4", "exaone4_5_text", "exaone_moe", "kolibri1"), True)
NEVER = set(
    """
    bloom jamba mpt nemotron_h zamba kimi_linear glm5_next glm5_next_text inkling_text inkling2_text
    inkling_mm_model
    """.split()  # noqa: SIM905
)
SWITCHES: dict[str, tuple[str, object]] = {  # an entry of the config, and its value if keys are rotated
    "falcon": ("alibi", False),
    "granitemoehybrid": ("position_embedding_type", "rope"),
    "zamba2": ("use_mem_rope", True),
}
UNREAD = set(
    """
    cohere2_moe nanochat molmo2_text dots3_note dots3_note_text qwen4_exp_text hy_v4 axk2 mistral_large4_text
    dory
    """.split()  # noqa: SIM905
)
THETA_UNSAID = {"falcon", "llama"}  # older configs of these have no entry about rotation
# Bases of models whose older configurations state none: (full layers, layers with a window)
BASES = {
    "gemma3": (1e6, 1e4), "gemma3_text": (1e6, 1e4), "gemma3n_text": (1e6, 1e4), "gemma3n": (1e6, 1e4),
    "modernbert": (16e4, 1e4), "modernbert-decoder": (16e4, 1e4),
}  # fmt: skip
WINDOW_BASES = "rope_local_base_freq", "local_rope_theta", "swa_rope_theta"
SCALED_IN_FULL_LAYERS = {"olmo3", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "step3p5"}
NAMES = "rope_parameters", "rope_scaling"
LOCAL = "window", "both_window"  # kinds of layers
LENGTHS = "original_max_position_embeddings", "max_position_embeddings"
STATED = (
    *NAMES, *WINDOW_BASES, "rope_theta", "rotary_emb_base", "rotary_dim", "global_rope_theta",
    "layer_rope_theta", "partial_rotary_factors",
)  # fmt: skip


def layer_rotations(
    words: Words, types: list[LayerType], sources: list[int | None], expanded: bool
) -> list[RopeWords | str]:
    """Return for each layer the arguments of its rotary embedding, or "none"."""
    rotates = rotating(words, types)
    if not any(rotates):
        words.use(*ROPE_WORDS)
        return [NO_ROTATION] * len(types)
    reader = Rotations(words, types, expanded)
    return [reader.of(i) if each else NO_ROTATION for i, each in enumerate(rotates)]


def rotating(words: Words, types: list[LayerType]) -> list[bool]:
    """Return whether each layer has keys that it rotates."""
    model, count = words.model_type, len(types)
    switch, value = SWITCHES.get(model, ("", None))  # most models have none
    if switch:
        words.use(switch)
    if (
        model in NEVER
        or words.flag("mla_use_nope", False)
        or (switch and words.entries.get(switch, False) != value)
    ):
        return [False] * count
    if words.value("kv_lora_rank") and words.count("qk_rope_head_dim", default=0) == 0:
        return [False] * count
    if model in UNREAD:
        raise words.error("config", ROTATES, f"model_type {model!r}, which kvkit cannot read")
    if (
        model
        and model not in THETA_UNSAID
        and model not in BASES
        and not any(name in words for name in STATED)
    ):
        raise words.error("config", ROTATES, f"model_type {model!r} without rope_parameters or rope_theta")
    keyed = [each.kind not in ("state", "conv", "none") for each in types]
    if model in WINDOWS_ROTATE:
        windows = [each.kind == "window" for each in types]
        return windows if any(windows) and words.value("sliding_window") else [WINDOWS_ROTATE[model]] * count
    if "no_rope_layers" in words or "no_rope_layer_interval" in words:
        keyed = [has and bool(one) for has, one in zip(keyed, rotating_layers(words, count), strict=True)]
        words.use("no_rope_layers", "no_rope_layer_interval")
    return keyed


class Rotations:
    """Reads the rotary embedding of each layer; keys of latent models may be expanded."""

    def __init__(self, words: Words, types: list[LayerType], expanded: bool) -> None:
        self.words, self.types, self.expanded = words, types, expanded
        self.count = len(types)
        self.parameters: Mapping[str, Any] = {}
        if words.value(*NAMES) is not None:
            self.parameters = words.part(words.name_of(NAMES)).entries
        raw = words.entries.get("rope_parameters")
        self.stated_types = set(raw) if isinstance(raw, Mapping) else set()
        self.thetas = self.listed("rope_theta")
        self.own_thetas = self.listed("layer_rope_theta")
        self.shares = self.listed("partial_rotary_factors")
        has_windows = any(each.kind in LOCAL for each in types)
        self.window_base = words.number(*WINDOW_BASES) if has_windows else None
        known = BASES.get(words.model_type)
        if known and self.window_base is None and not self.by_type:
            self.window_base = known[1]
        self.interleaved = self.pairs()

    def listed(self, name: str) -> list[Any] | None:
        """Return a list with a member for each layer, or None if the entry is no list."""
        if not isinstance(self.words.entries.get(name), (list, tuple)):
            return None
        return self.words.by_layer(name, self.count, drafts(self.words))

    @property
    def by_type(self) -> bool:
        """Return whether parameters are stated for each type of layers."""
        return bool({each.name for each in self.types} & self.stated_types)

    def pairs(self) -> bool | None:
        """Return whether pairs are neighbours; None if nothing says it."""
        words = self.words
        stated = words.value("rope_interleave", "rope_interleaved")
        if stated is not None and not isinstance(stated, bool):
            raise words.error("rope_interleave", "true or false", shown(stated))
        if not words.value("kv_lora_rank"):
            return words.model_type in NEIGHBOURS if stated is None else stated
        if stated is None and words.model_type in LATENT_NEIGHBOURS | LATENT_HALVES:
            return words.model_type in LATENT_NEIGHBOURS
        return stated

    def of(self, layer: int) -> RopeWords | str:
        """Return the rotary embedding of a layer."""
        words, kind = self.words, self.types[layer].kind
        if kind in ("v4_window", "csa", "hca"):
            return self.of_compressed(kind)
        local = kind in LOCAL
        parameters = self.of_type(layer)
        if parameters is None:
            return NO_ROTATION
        theta = self.theta(layer, parameters, local)
        if theta is None:
            return NO_ROTATION
        scaling = self.checked(parameters)
        if local and not self.by_type and self.unscaled_windows():
            scaling = {}
        for name in LENGTHS:
            if name in words:
                scaling.setdefault(name, words.value(name))
        if words.value("kv_lora_rank"):
            begin = words.count("qk_nope_head_dim") if self.expanded else words.count("kv_lora_rank")
            dim = words.count("qk_rope_head_dim", least=2)
            words.use("partial_rotary_factor", "head_dim")
            return RopeWords(dim, theta, self.interleaved, scaling, begin)
        changed = words.at(changes_of(words, kind, layer, self.count), f"layer {layer}")
        return RopeWords(self.rotary_dim(changed, layer, kind, scaling), theta, self.interleaved, scaling)

    def of_compressed(self, kind: str) -> RopeWords:
        """Return the rotary embedding of a layer of DeepSeek V4: of the last elements of a row.

        Layers with compressed rows have a base of their own, with YaRN and without its factor of keys.
        """
        words, parameters = self.words, dict(self.parameters)
        nested = parameters.get("main" if kind == "v4_window" else "compress")
        if nested is not None and not isinstance(nested, Mapping):
            raise words.error("rope_parameters", "mappings main and compress", shown(nested))
        names = "rope_theta", "compress_rope_theta"
        words.use(*names, *LENGTHS)
        stated = parameters.get("rope_theta") if kind == "v4_window" else None
        theta = (
            nested.get("rope_theta") if nested else stated or words.entries.get(names[kind != "v4_window"])
        )
        scaling = self.checked(nested or ({} if kind == "v4_window" else parameters))
        if scaling.get("rope_type", scaling.get("type")) == "yarn":
            scaling.setdefault("attention_factor", 1.0)
        dim, share = words.count("head_dim", least=2), words.value("partial_rotary_factor")
        share = scaling.get("partial_rotary_factor", share)
        stated_dim = words.count("qk_rope_head_dim", default=0)
        if not stated_dim and share is None:
            raise words.error("qk_rope_head_dim", "how many elements of a row rotate", "none")
        rotated = stated_dim or int(dim * words.positive("partial_rotary_factor", share))
        if not 2 <= rotated <= dim:
            raise words.error("qk_rope_head_dim", f"2 to {dim} elements of a row", rotated)
        return RopeWords(rotated, words.positive("rope_theta", theta), True, scaling, dim - rotated)

    def checked(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of a scaling, which are numbers, texts and lists of numbers."""
        for name, value in parameters.items():
            for each in value if isinstance(value, (list, tuple)) else [value]:
                short = not isinstance(each, int) or each.bit_length() <= 64
                if not (each is None or (isinstance(each, (bool, int, float, str)) and short)):
                    wanted = "a number, a text or a list of numbers"
                    raise self.words.error(f"{self.words.name_of(NAMES)}.{name}", wanted, shown(value))
        return dict(parameters)

    def unscaled_windows(self) -> bool:
        """Return whether layers with a window rotate without the scaling that is stated."""
        if self.words.model_type.startswith("modernbert"):
            return False
        return self.window_base is not None or self.words.model_type in SCALED_IN_FULL_LAYERS

    def of_type(self, layer: int) -> Mapping[str, Any] | None:
        """Return the parameters of a layer's type; None if layers of that type do not rotate."""
        if not self.by_type:
            return self.parameters
        name = self.types[layer].name
        if name not in self.stated_types:
            wanted = f"parameters of each type of layers: {name} is missing"
            raise self.words.error("rope_parameters", wanted, ", ".join(sorted(map(str, self.stated_types))))
        value = self.parameters.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.words.error(f"rope_parameters.{name}", "a mapping", shown(value))
        return value

    def theta(self, layer: int, parameters: Mapping[str, Any], local: bool) -> float | None:
        """Return the base of a layer; None if a list says that the layer does not rotate."""
        words = self.words
        for name, listed in (("layer_rope_theta", self.own_thetas), ("rope_theta", self.thetas)):
            if listed is not None:
                if listed[layer] == 0 and name == "layer_rope_theta":
                    return None
                return words.positive(f"{name}[{layer}]", listed[layer])
        stated = parameters.get("rope_theta")
        if local and self.window_base is not None:
            if self.by_type and stated != self.window_base:
                name = words.name_of(WINDOW_BASES)
                raise words.error(name, f"{shown(stated)}, as rope_parameters says", self.window_base)
            return self.window_base
        if stated is not None:
            stated = words.positive("rope_parameters.rope_theta", stated)
            if not self.by_type and words.number("rope_theta", "global_rope_theta", default=stated) != stated:
                wanted = f"{stated}, as rope_parameters says"
                raise words.error("rope_theta", wanted, shown(words.value("rope_theta")))
            words.use("rope_theta", "global_rope_theta")
            return stated
        names = ("rope_theta", "global_rope_theta", "rotary_emb_base")
        default = BASES.get(words.model_type, (1e4, 1e4))[0]
        if "attn_config" in words and words.part("attn_config").value("rope_theta") is not None:
            return words.part("attn_config").number("rope_theta")
        return words.number(*names, default=default)

    def rotary_dim(self, words: Words, layer: int, kind: str, parameters: Mapping[str, Any]) -> int:
        """Return how many elements of a head a layer rotates."""
        dim = self.key_dim(words, kind)
        share = parameters.get("partial_rotary_factor")
        if parameters.get("rope_type") == "proportional":  # it says itself which pairs of the head rotate
            return dim
        if self.shares is not None:
            share = self.shares[layer]
        words.use("partial_rotary_factors")
        if share is None:
            share = words.value("partial_rotary_factor", "rotary_pct")
        words.use("partial_rotary_factor", "rotary_pct")
        if share is None:
            return words.count("rotary_dim", default=dim, least=2)
        share = words.positive("partial_rotary_factor", share)
        if share > 1:
            raise words.error("partial_rotary_factor", "a share of at most 1", share)
        rotated = int(dim * share)
        if words.count("rotary_dim", default=rotated) != rotated:
            wanted = f"{rotated}, as partial_rotary_factor says of {dim} elements"
            raise words.error("rotary_dim", wanted, shown(words.value("rotary_dim")))
        return rotated

    def key_dim(self, words: Words, kind: str) -> int:
        """Return how many elements a key of a layer has."""
        local = kind in LOCAL
        if local and "swa_head_dim" in words:
            return words.count("swa_head_dim", least=1)
        if any(words.entries.get(name) for name in ("head_dim", "attention_head_dim", "kv_channels")):
            return head_dim(words, kind, 1)
        return head_dim(words, kind, words.count(*QUERIES, least=1))


def latent_scale(words: Words) -> float:
    """Return the scale of scores in latent attention, times YaRN's temperature squared."""
    nope, rotated = words.count("qk_nope_head_dim"), words.count("qk_rope_head_dim", default=0)
    if not nope + rotated:
        raise words.error("qk_nope_head_dim", "elements of a key", nope)
    scale = float(nope + rotated) ** -0.5
    if words.value(*NAMES) is None:
        return scale
    parameters = words.part(words.name_of(NAMES))
    all_dims = parameters.value("mscale_all_dim")
    if parameters.value("rope_type", "type") != "yarn" or not all_dims:
        return scale
    all_dims = parameters.positive("mscale_all_dim", all_dims)
    factor = parameters.number("factor")
    if factor is None:
        longest = words.number("max_position_embeddings")
        trained = parameters.number("original_max_position_embeddings")
        if longest is None or trained is None:
            raise parameters.error("factor", "a positive number", "none")
        factor = longest / trained
    temperature = 0.1 * all_dims * math.log(factor) + 1 if factor > 1 else 1.0
    return scale * temperature**2
