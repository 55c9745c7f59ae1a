"""Writes sessions and sequence states of llama.cpp byte by byte, from the text of the format."""

import struct


def u32(number):
    return struct.pack("<I", number)


def u64(number):
    return struct.pack("<Q", number)


def i32(*numbers):
    return struct.pack(f"<{len(numbers)}i", *numbers)


def head(session, version, tokens):
    return u32(0x6767736E if session else 0x67677371) + u32(version) + u32(len(tokens)) + i32(*tokens)


def session_part(arch, outputs, logits, embeddings):
    text = u32(len(arch)) + arch.encode() + u32(len(outputs)) + i32(*outputs)
    for numbers in (logits, embeddings):
        text += u64(len(numbers)) + struct.pack(f"<{len(numbers)}f", *numbers)
    return text


def memory(streams, v_trans, extra=False):
    """Return the bytes of a state's memory.

    Streams are (cells, layers): cells (position, sequences[, extra numbers]); layers (keys, values). Keys and
    values are (type, rows), rows a list of bytes, one for each cell; values None if there are none. Of
    transposed values the elements' size follows from the type of 2 or 4 bytes.
    """
    text = u32(len(streams))
    for cells, layers in streams:
        text += u32(len(cells))
        if not cells:
            continue
        for position, sequences, *more in cells:
            text += i32(position) + u32(len(sequences))
            text += i32(*more[0]) if extra else b""
            text += i32(*sequences)
        text += u32(v_trans) + u32(len(layers))
        for (kind, rows), _ in layers:
            text += i32(kind) + u64(len(rows[0])) + b"".join(rows)
        for _, values in layers:
            if values is None:
                continue
            kind, rows = values
            if not v_trans:
                text += i32(kind) + u64(len(rows[0])) + b"".join(rows)
                continue
            size = {0: 4, 1: 2, 30: 2}[kind]
            count = len(rows[0]) // size
            text += i32(kind) + u32(size) + u32(count)
            for j in range(count):
                for row in rows:
                    text += row[j * size : (j + 1) * size]
    return text
