"""A step of packed sequences on the device, checked and copied there once for all layers of a model."""

from dataclasses import dataclass

from kvkit.checks import index_tensors, sequences
from kvkit.checks.tensors import packed_tokens
from kvkit.checks.values import flag
from kvkit_cuda.calls import arrays, scan
from kvkit_cuda.calls.tables import Tables


@dataclass(frozen=True, slots=True)
class Step:
    """A checked step, whose tables are on the device, or wait to go there."""

    tables: Tables
    sequences: sequences.Packed


def planned(
    seqstarts,
    kvstarts,
    cachestarts,
    start_pos,
    decoding_batches=0,
    *,
    max_seqlen,
    max_kvlen,
    cache_mode,
    page_size,
    stream,
    check=True,
    tokens=None,
):
    """A `Step` that lasts, or one for (name, array) of packed tokens; checked if `check` says so."""
    wanted, lasting = flag("check", check), tokens is None
    table = arrays.operand("cachestarts", cachestarts, stream)
    stays = table.on_device and table.seen.ndim == 2 and table.seen.size > 0
    vectors = {"seqstarts": seqstarts, "kvstarts": kvstarts, "start_pos": start_pos}
    step = index_tensors.unchecked(
        tokens and packed_tokens(*tokens),
        **{name: arrays.host(name, index, stream) for name, index in vectors.items()},
        cachestarts=table.seen if stays else table.read(stream),
        max_seqlen=max_seqlen,
        max_kvlen=max_kvlen,
        cache_mode=cache_mode,
        page_size=page_size,
        take=index_tensors.of_form if stays else index_tensors.index,
    )
    if stays:
        tables = scan.taken(step, wanted, stream, lasting)
    else:
        tables = Tables(index_tensors.checked(step) if wanted else step, lasting)
    decoding = arrays.host("decoding_batches", decoding_batches, stream)
    return Step(tables, sequences.Packed(tables.steps, sequences.decoding(decoding, step)))
