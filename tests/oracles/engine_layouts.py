"""Where engines put an element, in the words of their own index code: one function a layout.

Each is (shape of lists, shape of one array, index): the index of (layer, kv, b, n, h, c) is the place of an
array in the lists and the element's offset in that array. Nothing is shared with the package; `make` fills in
the sizes, which engines' code has at hand.
"""

from types import SimpleNamespace

ELEMENT_BYTES = 2


def make(L, B, N, H, C):
    found = {}
    X = 16 // ELEMENT_BYTES  # elements of 16 bytes
    F = 32 // ELEMENT_BYTES  # elements of 32 bytes

    def layout(name, lists, shape, value_shape=None):
        def decorate(index):
            found[name] = SimpleNamespace(
                lists=lists, shape=shape, value_shape=value_shape or shape, index=index
            )
            return index

        return decorate

    # PMX: numpy's subscripts of the specification, told as strides.
    @layout("pmx-static-0", (), (B, L, 2, N, H, C))
    def _(layer, kv, b, n, h, c):
        return (), b * (L * 2 * N * H * C) + layer * (2 * N * H * C) + kv * (N * H * C) + n * (
            H * C
        ) + h * C + c

    @layout("pmx-static-1", (), (L, B, 2, H, N, C))
    def _(layer, kv, b, n, h, c):
        return (), layer * (B * 2 * H * N * C) + b * (2 * H * N * C) + kv * (H * N * C) + h * (
            N * C
        ) + n * C + c

    # Dynamic caches have rows, of which block b has those from b * N on.
    @layout("pmx-dynamic-0", (), (B * N, L, 2, H, C))
    def _(layer, kv, b, n, h, c):
        row = b * N + n
        return (), row * (L * 2 * H * C) + layer * (2 * H * C) + kv * (H * C) + h * C + c

    @layout("pmx-dynamic-1", (), (L, B * N, 2, H, C))
    def _(layer, kv, b, n, h, c):
        row = b * N + n
        return (), layer * (B * N * 2 * H * C) + row * (2 * H * C) + kv * (H * C) + h * C + c

    @layout("pmx-dynamic-2", (), (L, 2, B * N, H, C))
    def _(layer, kv, b, n, h, c):
        row = b * N + n
        return (), layer * (2 * B * N * H * C) + kv * (B * N * H * C) + row * (H * C) + h * C + c

    @layout("pmx-dynamic-3", (), (L, 2, H, B * N, C))
    def _(layer, kv, b, n, h, c):
        row = b * N + n
        return (), layer * (2 * H * B * N * C) + kv * (H * B * N * C) + h * (B * N * C) + row * C + c

    # Ascend: slot s is block s // N, row s % N.
    @layout("ascend-nd", (2,), (B, N, H, C))
    def _(layer, kv, b, n, h, c):
        slot = b * N + n
        return (kv,), (slot // N) * (N * H * C) + (slot % N) * (H * C) + h * C + c

    @layout("ascend-nhsd", (2,), (B, H, N, C))
    def _(layer, kv, b, n, h, c):
        slot = b * N + n
        return (kv,), (slot // N) * (H * N * C) + h * (N * C) + (slot % N) * C + c

    def fractal(b, n, h, c):
        slot, column = b * N + n, h * C + c
        return (slot // N) * N * (H * C) + (column // F) * N * F + (slot % N) * F + column % F

    @layout("ascend-nz", (2,), (B, H * C // F, N, F))
    def _(layer, kv, b, n, h, c):
        return (kv,), fractal(b, n, h, c)

    # vLLM: kv_cache[kv] of FlashAttention, then reshape_and_cache_flash's block and head strides.
    @layout("vllm-flash-attention", (L,), (2, B, N, H, C))
    def _(layer, kv, b, n, h, c):
        plane, block_stride, page_stride, head_stride = B * N * H * C, N * H * C, H * C, C
        return (layer,), kv * plane + b * block_stride + n * page_stride + h * head_stride + c

    @layout("vllm-flash-attention-hnd", (L,), (2, B, H, N, C))
    def _(layer, kv, b, n, h, c):
        plane, block_stride, page_stride, head_stride = B * N * H * C, N * H * C, C, N * C
        return (layer,), kv * plane + b * block_stride + n * page_stride + h * head_stride + c

    @layout("vllm-cross-layer-nhd", (), (B, L, 2, N, H, C))
    def _(layer, kv, b, n, h, c):
        return (), ((((b * L + layer) * 2 + kv) * N + n) * H + h) * C + c

    @layout("vllm-cross-layer-hnd", (), (B, H, L, 2, N, C))
    def _(layer, kv, b, n, h, c):
        return (), ((((b * H + h) * L + layer) * 2 + kv) * N + n) * C + c

    @layout("vllm-flashinfer-nhd", (L,), (B, 2, N, H, C))
    def _(layer, kv, b, n, h, c):
        return (layer,), b * (2 * N * H * C) + kv * (N * H * C) + n * (H * C) + h * C + c

    @layout("vllm-flashinfer-hnd", (L,), (B, 2, H, N, C))
    def _(layer, kv, b, n, h, c):
        return (layer,), b * (2 * N * H * C) + kv * (N * H * C) + h * (N * C) + n * C + c

    # vLLM since 0.26: logical axes L, B, H, N, and a content of the key, then the value.
    def content(kv, c):
        return c if kv == 0 else C + c

    @layout("vllm-lbnhc", (L,), (B, N, H, 2 * C))
    def _(layer, kv, b, n, h, c):
        return (layer,), ((b * N + n) * H + h) * 2 * C + content(kv, c)

    @layout("vllm-lbhnc", (L,), (B, H, N, 2 * C))
    def _(layer, kv, b, n, h, c):
        return (layer,), ((b * H + h) * N + n) * 2 * C + content(kv, c)

    @layout("vllm-lhbnc", (), (L, H, B, N, 2 * C))
    def _(layer, kv, b, n, h, c):
        return (), (((layer * H + h) * B + b) * N + n) * 2 * C + content(kv, c)

    @layout("vllm-blhnc", (), (B, L, H, N, 2 * C))
    def _(layer, kv, b, n, h, c):
        return (), (((b * L + layer) * H + h) * N + n) * 2 * C + content(kv, c)

    @layout("vllm-blnhc", (), (B, L, N, H, 2 * C))
    def _(layer, kv, b, n, h, c):
        return (), (((b * L + layer) * N + n) * H + h) * 2 * C + content(kv, c)

    @layout("vllm-bhlnc", (), (B, H, L, N, 2 * C))
    def _(layer, kv, b, n, h, c):
        return (), (((b * H + h) * L + layer) * N + n) * 2 * C + content(kv, c)

    # reshape_and_cache: keys [B, H, C / x, N, x], values [B, H, C, N].
    @layout("vllm-v0", (L, 2), (B, H, C // X, N, X), (B, H, C, N))
    def _(layer, kv, b, n, h, c):
        key = b * H * (C // X) * N * X + h * (C // X) * N * X + (c // X) * N * X + n * X + c % X
        value = b * H * C * N + h * C * N + c * N + n
        return (layer, kv), value if kv else key

    @layout("vllm-mla", (L,), (B, N, C))
    def _(layer, kv, b, n, h, c):
        return (layer,), b * N * C + n * C + c

    @layout("vllm-ds-mla", (L,), (B, N, C))
    def _(layer, kv, b, n, h, c):
        return (layer,), (b * N + n) * C + c

    # cpu_attn_vec: keys of a head [C, N], values [N, C].
    @layout("vllm-cpu-vec", (L,), (2, B, H, N * C))
    def _(layer, kv, b, n, h, c):
        head = ((kv * B + b) * H + h) * N * C
        return (layer,), head + (n * C + c if kv else c * N + n)

    # cpu_attn_amx reshape_and_cache: words of two elements in groups of 16 tokens; values likewise by tokens.
    @layout("vllm-cpu-amx", (L,), (2, B, H, N * C))
    def _(layer, kv, b, n, h, c):
        head = ((kv * B + b) * H + h) * N * C
        if kv == 0:
            words = C // 2
            word = (n // 16) * (16 * words) + n % 16 + (c // 2) * 16
            return (layer,), head + word * 2 + c % 2
        group_size = N * 16
        return (layer,), head + (n // 2) * 2 * 16 + n % 2 + (c // 16) * group_size + (c % 16) * 2

    # SGLang: k_buffer[layer][loc], a loc for every token.
    @layout("sglang-mha", (2, L), (B * N, H, C))
    def _(layer, kv, b, n, h, c):
        loc = b * N + n
        return (kv, layer), loc * (H * C) + h * C + c

    @layout("sglang-mha-paged", (2, L), (B, N, H, C))
    def _(layer, kv, b, n, h, c):
        return (kv, layer), (b * N + n) * (H * C) + h * C + c

    @layout("sglang-mla", (L,), (B * N, 1, C))
    def _(layer, kv, b, n, h, c):
        return (layer,), (b * N + n) * C + c

    @layout("sglang-hicache-layer-first", (), (2, L, B, N, H, C))
    def _(layer, kv, b, n, h, c):
        return (), ((kv * L + layer) * (B * N) + b * N + n) * (H * C) + h * C + c

    @layout("lmcache-components", (L,), (B, N, H, C))
    def _(layer, kv, b, n, h, c):
        return (layer,), ((b * N + n) * H + h) * C + c

    @layout("lmcache-chunk", (), (2, L, B * N, H * C))
    def _(layer, kv, b, n, h, c):
        return (), ((kv * L + layer) * (B * N) + b * N + n) * (H * C) + h * C + c

    @layout("sglang-hicache-page-first", (), (2, B * N, L, H, C))
    def _(layer, kv, b, n, h, c):
        return (), ((kv * (B * N) + b * N + n) * L + layer) * (H * C) + h * C + c

    @layout("sglang-hicache-page-first-direct", (), (2, B, L, N, H, C))
    def _(layer, kv, b, n, h, c):
        return (), (((kv * B + b) * L + layer) * N + n) * (H * C) + h * C + c

    @layout("sglang-hicache-page-head", (), (2, B, H, N, L, C))
    def _(layer, kv, b, n, h, c):
        return (), ((((kv * B + b) * H + h) * N + n) * L + layer) * C + c

    # FlashInfer's paged_kv_t: stride_page, stride_n, stride_h of either layout; values after keys in a page.
    def paged_kv(hnd):
        stride_page = 2 * N * H * C
        return stride_page, (C if hnd else H * C), (N * C if hnd else C)

    @layout("flashinfer-nhd", (), (B, 2, N, H, C))
    def _(layer, kv, b, n, h, c):
        page, entry, head = paged_kv(False)
        return (), b * page + kv * (N * H * C) + h * head + n * entry + c

    @layout("flashinfer-hnd", (), (B, 2, H, N, C))
    def _(layer, kv, b, n, h, c):
        page, entry, head = paged_kv(True)
        return (), b * page + kv * (N * H * C) + h * head + n * entry + c

    # append_paged_mla_kv_cache: ckv and kpe by stride_page and stride_n.
    @layout("flashinfer-mla", (2,), (B, N, C))
    def _(layer, kv, b, n, h, c):
        return (kv,), b * (N * C) + n * C + c

    @layout("flashinfer-nhd-pair", (2,), (B, N, H, C))
    def _(layer, kv, b, n, h, c):
        return (kv,), b * (N * H * C) + n * (H * C) + h * C + c

    @layout("flashinfer-hnd-pair", (2,), (B, H, N, C))
    def _(layer, kv, b, n, h, c):
        return (kv,), b * (N * H * C) + h * (N * C) + n * C + c

    @layout("flash-attn", (2,), (B, N, H, C))
    def _(layer, kv, b, n, h, c):
        batch_stride, row_stride, head_stride = N * H * C, H * C, C
        return (kv,), b * batch_stride + n * row_stride + h * head_stride + c

    # TensorRT-LLM getKVLocalIdx: inside a block of keys or of values.
    def local_index(token, head, channel):
        return head * N * C + (token % N) * C + channel

    @layout("tensorrt-llm", (), (B, L, 2, H, N, C))
    def _(layer, kv, b, n, h, c):
        return (), ((b * L + layer) * 2 + kv) * (H * N * C) + local_index(n, h, c)

    @layout("tensorrt-llm-linear", (), (B, 2, H, N, C))
    def _(layer, kv, b, n, h, c):
        return (), (b * 2 + kv) * (H * N * C) + local_index(n, h, c)

    @layout("tensorrt-edge-llm", (L,), (2, B, N, H, C))
    def _(layer, kv, b, n, h, c):
        return (layer,), (((kv * B + b) * N + n) * H + h) * C + c

    @layout("lmdeploy-pytorch", (2,), (L, B, N, H, C))
    def _(layer, kv, b, n, h, c):
        return (kv,), (((layer * B + b) * N + n) * H + h) * C + c

    # TurboMind's block: a layer's heads, of each all keys, then all values.
    @layout("lmdeploy-turbomind", (B,), (L, H, 2, N, C))
    def _(layer, kv, b, n, h, c):
        token, head = C, 2 * N * C
        per_layer = H * head
        return (b,), layer * per_layer + h * head + kv * (N * C) + n * token + c

    for name in ("hf", "mlx", "mlx-0.31", "ort-gqa"):

        @layout(name, (L, 2), (B, H, N, C))
        def _(layer, kv, b, n, h, c):
            return (layer, kv), ((b * H + h) * N + n) * C + c

    for name in ("ort-paged", "vllm-ascend-nd"):

        @layout(name, (L, 2), (B, N, H, C))
        def _(layer, kv, b, n, h, c):
            return (layer, kv), ((b * N + n) * H + h) * C + c

    # llama.cpp: ne = [n_embd_gqa, kv_size, n_stream]; transposed, element j of cell i is at j * kv_size + i.
    @layout("llama-cpp", (L, 2), (B, N, H, C))
    def _(layer, kv, b, n, h, c):
        n_embd = H * C
        return (layer, kv), b * N * n_embd + n * n_embd + h * C + c

    @layout("llama-cpp-v-trans", (L, 2), (B, N, H, C), (B, H, C, N))
    def _(layer, kv, b, n, h, c):
        n_embd, j = H * C, h * C + c
        return (layer, kv), b * N * n_embd + (j * N + n if kv else n * n_embd + j)

    # Ragged paged attention: combined heads, keys 0::2, values 1::2.
    @layout("jax", (L,), (B, N, 2 * H, C))
    def _(layer, kv, b, n, h, c):
        combined = 2 * h + kv
        return (layer,), ((b * N + n) * (2 * H) + combined) * C + c

    @layout("openvino", (2, L), (B, H, N, C))
    def _(layer, kv, b, n, h, c):
        return (kv, layer), ((b * H + h) * N + n) * C + c

    @layout("deepspeed", (), (L, B, N, 2, H, C))
    def _(layer, kv, b, n, h, c):
        return (), (((layer * B + b) * N + n) * 2 + kv) * (H * C) + h * C + c

    @layout("lightllm", (L,), (B, N, 2, H, C))
    def _(layer, kv, b, n, h, c):
        combined = kv * H + h  # of 2 H: keys first
        return (layer,), (b * N + n) * (2 * H * C) + combined * C + c

    @layout("vllm-ascend-nz", (L, 2), (B, H * C // F, N, F))
    def _(layer, kv, b, n, h, c):
        return (layer, kv), fractal(b, n, h, c)

    @layout("vllm-ascend-mla", (L, 2), (B, N, 1, C))
    def _(layer, kv, b, n, h, c):
        return (layer, kv), (b * N + n) * C + c

    @layout("vllm-ascend-planes", (L, 2), (B, N, C))
    def _(layer, kv, b, n, h, c):
        return (layer, kv), (b * N + n) * C + c

    # As LMCache's names read: NB, NH, BS, TWO, HS.
    @layout("lmcache-nh-bs-two", (L,), (B, H, N, 2, C))
    def _(layer, kv, b, n, h, c):
        return (layer,), (((b * H + h) * N + n) * 2 + kv) * C + c

    @layout("lmcache-bs-nh-two", (L,), (B, N, H, 2, C))
    def _(layer, kv, b, n, h, c):
        return (layer,), (((b * N + n) * H + h) * 2 + kv) * C + c

    @layout("rbln", (L,), (2, B, H, 1, N, C))
    def _(layer, kv, b, n, h, c):
        return (layer,), (((kv * B + b) * H + h) * N + n) * C + c

    return found
