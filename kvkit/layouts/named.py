"""Name the layouts of engines, each a line with its source."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from kvkit.errors import argument_error, brief, describe, near_names
from kvkit.layouts.grammar import Layout, parse_line


@dataclass(frozen=True)
class Named:
    """Describes a layout of an engine.

    Attributes
    ----------
    line : str
        The layout.
    engine, versions : str
        The engine, and the versions that have the layout.
    source : str
        The file, issue or text that shows it.
    mark : str
        How well the line is known. A: checked against a transcription of the engine's index code; S: read in
        its source; T: from a thread or documentation; K: common knowledge.
    note : str
        Facts that the line does not show, such as where keys and values are.
    aliases : tuple of str
        Names of the layout in vLLM (``KVCacheLayout``), LMCache (its registry) and others.
    """

    line: str
    engine: str
    versions: str
    source: str
    mark: str
    note: str = ""
    aliases: tuple[str, ...] = ()

    @cached_property
    def layout(self) -> Layout:
        """Return the parsed line."""
        return parse_line(self.line)


EITHER = "a line, such as 'l | kv b n h c', or a name that `kvkit list layouts` prints"
# Notes, (engine, source, mark) and sources that several layouts share.
HALVED = "keys are index 0 of kv, values index 1"
BY_SIDE = (
    "the content of a head is its key, then its value; the engine views each of these lines as (b, h, n, 2 D)"
)
LISTS = "keys and values are separate arrays"
RESHAPE = "ReshapeAndCache", "text of ReshapeAndCache", "A"
PMX = "OpenPPL's text of KeyValueCache", "A"
FA = "vllm@5704f34:vllm/v1/attention/backends/flash_attn.py"
UNIFIED = "vllm#44455, vllm#51718"
SGLANG = "sglang@000ccdb:python/sglang/srt/mem_cache/memory_pool.py"
FLASHINFER = "flashinfer@fb28d72:docs/tutorials/kv_layout.rst"
LLAMA = "llama.cpp@3514e9f:src/llama-kv-cache.cpp"
LMDEPLOY = "lmdeploy@1263d5c:"
ASCEND = "vllm-ascend@182b75e:vllm_ascend/attention/attention_v1.py"
LMCACHE = "LMCache", "registry of 2026", "lmcache:csrc/engine_kv_format.h"
OLD = "deprecated by LMCache; the bytes are those of vllm-"  # and the end of the name
ONE_POOL = "all layers in one pool; the content of a head is its key, then its value"

NAMED = MappingProxyType({
    "pmx-static-0": Named("| b l kv n h c", "PMX", "cache_layout 0, static", *PMX, HALVED),
    "pmx-static-1": Named("| l b kv h n c", "PMX", "cache_layout 1, static", *PMX, HALVED),
    "pmx-dynamic-0": Named("| n l kv h c", "PMX", "cache_layout 0, dynamic", *PMX, HALVED),
    "pmx-dynamic-1": Named("| l n kv h c", "PMX", "cache_layout 1, dynamic", *PMX, HALVED),
    "pmx-dynamic-2": Named("| l kv n h c", "PMX", "cache_layout 2, dynamic", *PMX, HALVED),
    "pmx-dynamic-3": Named("| l kv h n c", "PMX", "cache_layout 3, dynamic", *PMX, HALVED),
    "ascend-nd": Named("kv | b n h c", "Ascend operators", *RESHAPE, LISTS, ("ND",)),
    "ascend-nhsd": Named("kv | b h n c", "Ascend operators", *RESHAPE, LISTS, ("NHSD",)),
    "ascend-nz": Named(
        "kv | b (h c1) n c0[32B]", "Ascend operators", *RESHAPE,
        "groups of 32 bytes; if one spans two heads, pass all heads as one", ("NZ",),
    ),
    "vllm-flash-attention": Named(
        "l | kv b n h c", "vLLM", "v1, until June 2026", f"{FA} get_kv_cache_shape", "A", HALVED,
        ("NL_X_TWO_NB_BS_NH_HS",),
    ),
    "vllm-flash-attention-hnd": Named(
        "l | kv b h n c", "vLLM", "v1, until June 2026, VLLM_KV_CACHE_LAYOUT=HND",
        f"{FA} get_kv_cache_stride_order", "S", f"{HALVED}; code sees (kv, b, n, h, c), a strided view",
        ("NL_X_TWO_NB_NH_BS_HS",),
    ),
    "vllm-cross-layer-nhd": Named(
        "| b l kv n h c", "vLLM", "v1, cross-layer blocks", FA, "A", HALVED, ("NB_NL_TWO_BS_NH_HS",)
    ),
    "vllm-cross-layer-hnd": Named("| b h l kv n c", "vLLM", "v1, cross-layer blocks", FA, "S", HALVED),
    "vllm-flashinfer-nhd": Named(
        "l | b kv n h c", "vLLM", "FlashInfer and Triton, until June 2026", "vllm@00a817a flashinfer.py", "A",
        HALVED, ("NL_X_NB_TWO_BS_NH_HS",),
    ),
    "vllm-flashinfer-hnd": Named(
        "l | b kv h n c", "vLLM", "FlashInfer, until June 2026", "vllm@00a817a flashinfer.py", "A", HALVED,
        ("NL_X_NB_TWO_NH_BS_HS",),
    ),
    "vllm-lbnhc": Named(
        "l | b n h (kv c)", "vLLM", "since 0.26, the default", UNIFIED, "A", BY_SIDE,
        ("LBNHC", "NL_X_NB_BS_NH_CS"),
    ),
    "vllm-lbhnc": Named(
        "l | b h n (kv c)", "vLLM", "since 0.26", UNIFIED, "A", BY_SIDE, ("LBHNC", "NL_X_NB_NH_BS_CS")
    ),
    "vllm-lhbnc": Named("| l h b n (kv c)", "vLLM", "since 0.26", UNIFIED, "S", ONE_POOL, ("LHBNC",)),
    "vllm-blhnc": Named("| b l h n (kv c)", "vLLM", "since 0.26", UNIFIED, "S", ONE_POOL, ("BLHNC",)),
    "vllm-blnhc": Named("| b l n h (kv c)", "vLLM", "since 0.26", UNIFIED, "S", ONE_POOL, ("BLNHC",)),
    "vllm-bhlnc": Named("| b h l n (kv c)", "vLLM", "since 0.26", UNIFIED, "S", ONE_POOL, ("BHLNC",)),
    "vllm-v0": Named(
        "l kv | b h c1 n c0[16B] ; b h c n", "vLLM", "v0, ROCm and Triton prefix prefill", "vllm#48257", "A",
        "keys with content in groups of 16 bytes, values with tokens innermost",
    ),
    "vllm-mla": Named(
        "l | b n c", "vLLM", "MLA", "vllm@bc8282e:vllm/v1/kv_cache_interface.py MLAAttentionSpec", "S",
        "one latent row, which is the key; its first elements (512 of 576) are the value", ("NL_X_NB_BS_HS",),
    ),
    "vllm-ds-mla": Named(
        "l | b n c", "vLLM, FlashMLA", "fp8_ds_mla", "flashmla@9241ae3:tests/quant.py", "S",
        "bytes of the format ds_mla: c is 656, 512 codes, 4 scales, 64 bfloat16; blocks may have any stride",
    ),
    "flashmla-ds-v4": Named(
        "l | b (n c + n s)", "FlashMLA", "DeepSeek V4", "flashmla@9241ae3:tests/quant.py", "S",
        "bytes of the format ds_v4: 576 for each token (codes, bfloat16), then 8 for each token (exponents); "
        "blocks end at a multiple of 576",
    ),
    "vllm-dsa-indexer": Named(
        "l | b (n c + n s)", "vLLM", "DSA indexer", LMCACHE[2], "S",
        "a block has the codes of all tokens, 128 bytes each, then their scales, 4 bytes each",
        ("NL_X_NB_BSV_BSS",),
    ),
    "vllm-cpu-vec": Named(
        "l | kv b h (c n) ; kv b h (n c)", "vLLM", "CPU, VEC", "vllm@07dd2f4:csrc/cpu/cpu_attn_vec.hpp", "A",
        "the shape says (kv, b, h, n, c), the bytes do not: give .reshape(2, NB, H, -1), and n or c in sizes",
    ),
    "vllm-cpu-amx": Named(
        "l | kv b h (n1 c1 n0[16] c0[2]) ; kv b h (c1 n1 c0[16] n0[2])", "vLLM", "CPU, AMX, 16-bit floats",
        "vllm@0e1ce52:csrc/cpu/cpu_attn_amx.hpp", "A",
        "pairs for matrix tiles; the shape says (kv, b, h, n, c): give .reshape(2, NB, H, -1), and n or c",
    ),
    "sglang-mha": Named(
        "kv l | (b n) h c", "SGLang", "MHATokenToKVPool", f"{SGLANG} _create_buffers", "A",
        f"{LISTS}, k_buffer and v_buffer, a list each; page 0 is for dummy writes",
        ("TWO_X_NL_X_NBBS_NH_HS",),
    ),
    "sglang-mha-paged": Named(
        "kv l | b n h c", "SGLang", "MHATokenToKVPool, blocks apart", LMCACHE[2], "A", LISTS,
        ("TWO_X_NL_X_NB_BS_NH_HS",),
    ),
    "sglang-mla": Named(
        "l | (b n) 1 c", "SGLang", "MLATokenToKVPool", SGLANG, "S",
        "one latent row, which is the key; its first elements are the value", ("NL_X_NBBS_ONE_HS",),
    ),
    "sglang-hicache-layer-first": Named(
        "| kv l b n h c", "SGLang", "HiCache host pool", f"{SGLANG} init_kv_buffer", "S", HALVED
    ),
    "sglang-hicache-page-first": Named(
        "| kv (b n) l h c", "SGLang", "HiCache host pool", f"{SGLANG} init_kv_buffer", "S", HALVED
    ),
    "sglang-hicache-page-first-direct": Named(
        "| kv b l n h c", "SGLang", "HiCache host pool", f"{SGLANG} init_kv_buffer", "A", HALVED
    ),
    "sglang-hicache-page-head": Named(
        "| kv b h n l c", "SGLang", "HiCache host pool", f"{SGLANG} init_kv_buffer", "A", HALVED
    ),
    "flashinfer-nhd": Named("| b kv n h c", "FlashInfer", "5 axes", FLASHINFER, "A", HALVED),
    "flashinfer-hnd": Named("| b kv h n c", "FlashInfer", "5 axes", FLASHINFER, "A", HALVED),
    "flashinfer-nhd-pair": Named("kv | b n h c", "FlashInfer", "a tuple", FLASHINFER, "A", LISTS),
    "flashinfer-hnd-pair": Named("kv | b h n c", "FlashInfer", "a tuple", FLASHINFER, "A", LISTS),
    "flashinfer-mla": Named(
        "kv | b n c", "FlashInfer", "MLA", "flashinfer@fb28d72:flashinfer/mla.py", "A",
        "ckv_cache (512, the value) and kpe_cache (64): two planes of the key, arrays or slices of one",
    ),
    "flash-attn": Named(
        "kv | b n h c", "flash-attn", "2 and 3", "flash-attention@0251105:csrc/flash_attn/flash_api.cpp", "S",
        f"{LISTS}; without a block table b is the batch and n its longest sequence",
    ),
    "tensorrt-llm": Named(
        "| b l kv h n c", "TensorRT-LLM", "paged",
        "tensorrt-llm@0ccf903:cpp/tensorrt_llm/kernels/kvCacheUtils.h", "A",
        "its page table lists blocks of keys and blocks of values separately", ("NB_NL_TWO_NH_BS_HS",),
    ),
    "tensorrt-llm-linear": Named(
        "| b kv h n c", "TensorRT-LLM", "linear",
        "tensorrt-llm@0ccf903:cpp/tensorrt_llm/kernels/kvCacheUtils.h KVLinearBuffer", "S", HALVED,
    ),
    "tensorrt-edge-llm": Named(
        "l | kv b n h c", "TensorRT-Edge-LLM", "0.11", "documentation of 0.11.0", "T",
        f"{HALVED}; pages of 128 tokens",
    ),
    "lmdeploy-pytorch": Named(
        "kv | l b n h c", "LMDeploy", "PyTorch engine",
        f"{LMDEPLOY}lmdeploy/pytorch/engine/cache_engine.py:536", "A",
        "views of one pool of bytes: keys, values and scales of a layer's block, each padded to 256 bytes",
    ),
    "lmdeploy-turbomind": Named(
        "b | l h kv n c", "LMDeploy", "TurboMind", f"{LMDEPLOY}src/turbomind/kernels/attention/block.h", "A",
        "blocks are pointers; scales of codes follow after a layer's elements",
    ),
    "hf": Named(
        "l kv | b h n c", "Transformers", "5.23", "transformers 5.23 cache_utils.py", "A",
        f"{LISTS}, layers[i].keys and .values; n is the longest sequence, or a static cache's room",
    ),
    "mlx": Named(
        "l kv | b h n c", "MLX", "mlx-lm 0.32", "mlx-lm 0.32.2:mlx_lm/models/cache.py", "A",
        f"{LISTS}; n grows by 256, rows from offset on are no tokens; .safetensors files are prompt caches",
    ),
    "mlx-0.31": Named(
        "l kv | b h n c", "MLX", "before mlx-lm 0.32", "mlx-lm 0.31.3:mlx_lm/models/cache.py", "A",
        f"{LISTS}; files end with the last token; .safetensors files are prompt caches",
    ),
    "ort-gqa": Named(
        "l kv | b h n c", "ONNX Runtime", "GroupQueryAttention", "operator of 1.31", "A",
        f"{LISTS}, past and present",
    ),
    "ort-paged": Named(
        "l kv | b n h c", "ONNX Runtime", "PagedAttention, CUDA", "onnxruntime#24595", "T", LISTS
    ),
    "llama-cpp": Named(
        "l kv | b n h c", "llama.cpp", "keys, and values with flash attention", LLAMA, "A",
        f"{LISTS}; b is a stream, n a cell",
    ),
    "llama-cpp-v-trans": Named(
        "l kv | b n h c ; b h c n", "llama.cpp", "without flash attention", f"{LLAMA} state_write_data", "A",
        f"{LISTS}; in values, all cells of an element are neighbours",
    ),
    "jax": Named(
        "l | b n (h kv) c", "JAX, vLLM on TPU, SGLang-JAX", "ragged paged attention",
        "jax ref_ragged_paged_attention", "A",
        "combined heads: keys are heads 0::2, values heads 1::2; the bytes of vllm-lbnhc",
    ),
    "openvino": Named(
        "kv l | b h n c", "OpenVINO", "PagedAttention, CPU, floats", "openvino 2026.4.1", "A",
        f"{LISTS}; blocks of 32 tokens",
    ),
    **{
        f"openvino-u{bits}": Named(
            "kv l | b h (s + n) c ; b h n (s + c)", "OpenVINO",
            f"PagedAttention, CPU, KV_CACHE_PRECISION u{bits}", "openvino 2026.4.1", "A",
            f"{LISTS}; {rows} rows with scale and zero of each channel, then 32 tokens; rows of values begin"
            " with scale and zero",
        )
        for bits, rows in ((8, 8), (4, 16))
    },
    "deepspeed": Named(
        "| l b n kv h c", "DeepSpeed", "FastGen", "docstring of BlockedKVCache", "A",
        "keys are [:, :, :, 0], values [:, :, :, 1]",
    ),
    "lightllm": Named(
        "l | b n kv h c", "LightLLM", "", "source, from memory", "A",
        "a row has the heads of keys, then those of values; blocks of 1 token",
    ),
    "vllm-ascend-nd": Named(
        "l kv | b n h c", "vLLM-Ascend", "ND", f"{ASCEND}:110", "S", f"{LISTS}; kernel blocks of 128 tokens",
        ("NL_X_TWO_X_NB_BS_NH_HS",),
    ),
    "vllm-ascend-nz": Named(
        "l kv | b (h c1) n c0[32B]", "vLLM-Ascend", "310P; C8 codes", f"{ASCEND}:2196", "A",
        "groups of 32 bytes: 16 elements of 16 bits, 32 codes of 8",
    ),
    "vllm-ascend-mla": Named(
        "l kv | b n 1 c", "vLLM-Ascend", "MLA and DSA",
        "vllm-ascend@182b75e:vllm_ascend/attention/mla_v1.py:88",
        "S", "the two lists are planes of the key: its latent part (which is the value), its rotary part",
        ("NL_X_NP_X_NB_BS_ONE_HS",),
    ),
    "vllm-ascend-planes": Named(
        "l kv | b n c", "vLLM-Ascend", "MLA and DSA, as LMCache names it", LMCACHE[2], "S",
        "the planes of vllm-ascend-mla without the axis of 1", ("NL_X_TWO_X_NB_BS_HS",),
    ),
    "lmcache-nh-bs-two": Named(
        "l | b h n kv c", *LMCACHE, "S", f"{OLD}lbhnc", ("NL_X_NB_NH_BS_TWO_HS",)
    ),
    "lmcache-bs-nh-two": Named(
        "l | b n h kv c", *LMCACHE, "S", f"{OLD}lbnhc", ("NL_X_NB_BS_NH_TWO_HS",)
    ),
    "lmcache-components": Named(
        "l | b n h c", "LMCache", "0.5.6, SGLang's components", "lmcache 0.5.6", "S",
        "each array is keys or values alone, as if it were a layer", ("NL_X_NB_BS_NH_HS",),
    ),
    "lmcache-chunk": Named(
        "| kv l n (h c)", "LMCache", "0.5.6, chunks", "lmcache 0.5.6", "A", HALVED, ("KV_2LTD",)
    ),
    "rbln": Named(
        "l | kv b h 1 n c", "RBLN", "vLLM plugin", LMCACHE[2], "S", HALVED, ("NL_X_TWO_NB_NH_ONE_BS_HS",)
    ),
})  # fmt: skip
ALIASES = {alias: name for name, named in NAMED.items() for alias in named.aliases}


def parse(text: str | Layout) -> Layout:
    """Return the layout of a line, or of a layout's name.

    Parameters
    ----------
    text : str or Layout
        A name of `NAMED`, its name in vLLM or LMCache, or a line ``LISTS | AXES``. Left of the bar are the
        levels of lists of arrays, right of it the axes of each array, outermost first; a line without a bar
        is one array. The axes are ``l`` layer, ``kv`` (keys 0, values 1), ``b`` block (or sequence, if caches
        are contiguous), ``n`` token in the block, ``h`` key head, ``c`` content of a head, ``s`` scale
        groups. ``c1`` and ``c0[8]`` are the outer part of the content and its inner part of 8 elements
        (``c0[32B]``: 32 bytes); ``1`` is an axis of length 1; ``(h c)`` is one axis of the array that joins
        two. After ``;`` come the axes of values, if they differ. A `Layout` is returned as it is.

    Raises
    ------
    KvkitError
        If the text is neither a line nor a name.

    Examples
    --------
    >>> from kvkit.layouts import parse
    >>> print(parse("LBNHC"))
    l | b n h (kv c)
    >>> parse("l | kv b n h c") == parse("NL_X_TWO_NB_BS_NH_HS")
    True
    >>> parse("l | kv b n")
    Traceback (most recent call last):
    kvkit.errors.KvkitError: layout: expected an axis of content, c (or of scale groups, s), got 'l | kv b n'
    """
    if isinstance(text, Layout):
        return text
    if not isinstance(text, str):
        raise argument_error("layout", EITHER, describe(text))
    name = ALIASES.get(text, text)
    if name in NAMED:
        return NAMED[name].layout
    if text and not set(text) & set("| ;()"):
        near = near_names(text, [*NAMED, *ALIASES])
        raise argument_error("layout", EITHER, repr(brief(text)) + near)
    return parse_line(text)


def family(prefix: str) -> tuple[Layout, ...]:
    """Return the layouts that are named "PREFIX-NUMBER", in order."""
    return tuple(named.layout for name, named in NAMED.items() if name.rpartition("-")[0] == prefix)
