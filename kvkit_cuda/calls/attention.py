"""Prepare the launches of a checked call of attention: fill the record and choose the kernel."""

import numpy as np

from kvkit.formats import BY_NAME
from kvkit_cuda.attention import decode, latent, params, plain, prefill
from kvkit_cuda.device_runtime import host

KERNELS = (decode, latent, prefill, plain)  # a call uses the first that suits it; plain suits any call


def prepare(query, out, lse, context, tables, decoding, weights, rows, stream, sums=None):
    """Return launches that compute attention into `out` and, unless None, `lse`, all on the device.

    With `sums` [B, query heads, tokens], which receives the weights of keys, `lse` is not None, and the
    kernel is the plain one: a second kernel computes the same scores again, bit for bit. The cache has `rows`
    rows; later steps may need more of them than this one.

    A kernel is a module with `suits(record, context, reach, most_rows)` and `prepare(record, context, tables,
    most_rows, stream)`, where `most_rows` is the most query rows of a sequence that share a key head. After
    the first call of its form, a call with these `tables` copies and allocates nothing.
    """
    steps = tables.steps
    record = params.attention_params(query, out, lse, context, steps.page_size, decoding, weights)
    scales, slopes = weights.scales, weights.slopes
    if scales is not None and not params.is_shared(scales):  # by all heads
        _, sequences, heads = scales.shape
        (tables.on_device["scales"],) = host.tables([bits(scales)], stream)
        at = host.address(tables.on_device["scales"])
        record = record._replace(
            head_scale_sequence=8 * heads * (sequences > 1), head_scale_head=8 * (heads > 1),
            key_head_scales=at, value_head_scales=at + 4 * scales.size,
        )  # fmt: skip
    if slopes is not None:
        sequences, heads = slopes.shape  # sequences, or 1
        (tables.on_device["slopes", heads],) = host.tables([bits(slopes.reshape(-1))], stream)
        record = record._replace(sloped=1, slopes_sequence=heads * (sequences > 1))
    if (  # strides of pools, or scales <= 0: the plain kernel's general form
        context.steps != (1, 1)
        or any(context.elements)
        or context.value_format not in (None, context.cache_format)
        or steps.value_table is not None
        or not (scales is None or (scales[0] > 0).all())
    ):
        record = record._replace(**pool_fields(context, tables, stream))
    most_tokens = int(np.diff(steps.seqstarts).max(initial=0))
    most_rows, reach = most_tokens * record.group, params.reach(tables, rows)
    kernels = KERNELS if sums is None else [plain]
    kernel = next(kernel for kernel in kernels if kernel.suits(record, context, reach, most_rows))
    launches = kernel.prepare(record, context, tables, most_rows, stream) if most_rows else []
    if sums is not None:
        launches.append(plain.prepare_weights(record, context, tables, most_tokens, sums, stream))
    return launches


def pool_fields(context, tables, stream):
    """Return the fields of general strides, and copy the table of values, if there is one, to the device."""
    steps = tables.steps
    formats = context.cache_format, context.value_format or context.cache_format
    key_element, value_element = (
        stride or BY_NAME[name].bytes(1) for stride, name in zip(context.elements, formats, strict=True)
    )
    fields = {"general": 1, "key_element": key_element, "value_element": value_element}
    fields |= {"key_step": context.steps[0], "value_step": context.steps[1]}
    if steps.value_table is not None:
        fields["value_table"] = host.address(*tables.of(("value_table",), stream))
    return fields


def bits(numbers):
    """Return the bits of float32 numbers as int64."""
    return numbers.view(np.uint32).astype(np.int64)
