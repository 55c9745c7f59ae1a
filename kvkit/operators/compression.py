"""The modes of a compressed cache as data: the tokens that each keeps, and the arguments that it needs."""

import enum


class CompressType(enum.IntEnum):
    """The modes in which `ascend.reshape_and_cache` stores a sequence (see `MEANING`)."""

    UNDEFINED = 0
    KVHEAD = 1
    KVHEAD_ROPE = 2
    OMNI = 3


MEANING = {
    CompressType.UNDEFINED: "every token, all heads side by side",
    CompressType.KVHEAD: "of each head its most recent tokens",
    CompressType.KVHEAD_ROPE: "of each head all, a range as its mean",
    CompressType.OMNI: "of each head all but a range",
}
NEEDED = {
    CompressType.UNDEFINED: (),
    CompressType.KVHEAD: ("wins", "seq_lens"),
    CompressType.KVHEAD_ROPE: ("wins", "seq_lens", "offset_index"),
    CompressType.OMNI: ("wins", "seq_lens", "offset_index"),
}
