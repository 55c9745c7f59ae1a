"""A step of packed sequences on the device, checked and copied there once for all layers of a model."""

from dataclasses import dataclass

from kvkit import attention, steps
from kvkit.check import integer, packed_tokens
from kvkit_cuda.calls import arrays, scan
from kvkit_cuda.calls.tables import Tables


@dataclass(frozen=True, slots=True)
class Step:
    """A checked step, whose tables are on the device, or wait to go there."""

    tables: Tables
    decoding: int

    @property
    def steps(self):
        return self.tables.steps


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
    wanted, lasting = attention.flag("check", check), tokens is None
    table = arrays.operand("cachestarts", cachestarts, stream)
    stays = table.on_device and table.seen.ndim == 2 and table.seen.size > 0
    vectors = {"seqstarts": seqstarts, "kvstarts": kvstarts, "start_pos": start_pos}
    step = steps.unchecked(
        tokens and packed_tokens(*tokens),
        **{name: arrays.host(name, index, stream) for name, index in vectors.items()},
        cachestarts=table.seen if stays else table.read(stream),
        max_seqlen=max_seqlen,
        max_kvlen=max_kvlen,
        cache_mode=cache_mode,
        page_size=page_size,
        take=steps.of_form if stays else steps.index,
    )
    if stays:
        tables = scan.taken(step, wanted, stream, lasting)
    else:
        tables = Tables(steps.checked(step) if wanted else step, lasting)
    decoding = arrays.host("decoding_batches", decoding_batches, stream)
    return Step(tables, integer("decoding_batches", decoding, 0, len(step.start_pos)))
