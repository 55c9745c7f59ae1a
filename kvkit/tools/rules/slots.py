"""Check slots, in which a step stores its tokens: rules S1 to S7."""

import numpy as np

from kvkit.checks.values import text
from kvkit.tools.case import Case
from kvkit.tools.findings import Seen, rule

INDEX_BITS = {"int32": 31, "uint32": 32, "int64": 63}


@rule(
    "S1",
    "The token overwrites another one, and attention does not find it. Compute slots from the same table.",
    needs="block_tables, slot_mapping, slot_sequences, slot_positions",
)
def not_where_the_table_says(case: Case) -> Seen:
    """Report tokens in slots of other positions. LMCache#4921: slots of a part were taken for the whole."""
    if case.page_of_tokens is None:
        return None
    sequences, positions = case.slot_tokens
    meant = case.page_of_tokens * case.page_size + positions % case.page_size
    hits = np.flatnonzero((case.slots >= 0) & (case.slots != meant))

    def words(i: int) -> tuple[str, str]:
        what = f"slot {case.slots[i]} for position {positions[i]} of sequence {sequences[i]}"
        if case.page_of_tokens[i] < 0:
            return f"slot_mapping[{i}]", f"{what}, for which the table has no page"
        return f"slot_mapping[{i}]", f"{what}, which the table has in {meant[i]}"

    return hits, words


@rule(
    "S2",
    "One of the tokens is lost, at random. Look for a window or ring buffer that is too small.",
    needs="slot_mapping, num_blocks, page_size",
)
def twice_in_a_step(case: Case) -> Seen:
    """Report slots that two tokens have. pypto-lib#459: slots modulo a window wrapped around."""
    return named_twice("slot_mapping", case.slots)


def named_twice(name: str, slots: np.ndarray | None) -> Seen:
    """Return the slots that two entries of an index tensor name; those below 0 name none."""
    if slots is None:
        return None
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    hits = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0))
    return hits, lambda i: (f"{name}[{order[i + 1]}]", f"slot {ordered[i]}, as in entry {order[i]}")


@rule(
    "S3",
    "The token is stored outside the cache. Check how many blocks were really allocated.",
    needs="slot_mapping, num_blocks, page_size",
)
def outside_the_cache(case: Case) -> Seen:
    """Report slots outside the cache. kvcached#469: blocks of a pool larger than the reserved one."""
    if case.slots is None:
        return None
    capacity = case.num_blocks * case.page_size
    hits = np.flatnonzero(case.slots >= capacity)
    return hits, lambda i: (f"slot_mapping[{i}]", f"slot {case.slots[i]}, the cache has {capacity}")


@rule(
    "S4",
    "Unused entries of tables point to this page, so it may be read. For padding use slot -1.",
    "warning",
    needs="slot_mapping, reserved_block",
)
def in_the_reserved_page(case: Case) -> Seen:
    """Report slots in the page that unused entries name. vllm#39444: dummy runs stored NaN there."""
    if case.slots is None or case.reserved_block is None:
        return None
    hits = np.flatnonzero((case.slots >= 0) & (case.slots // case.page_size == case.reserved_block))
    reserved = f"of reserved page {case.reserved_block}"
    return hits, lambda i: (f"slot_mapping[{i}]", f"slot {case.slots[i]} {reserved}")


@rule(
    "S5",
    "Entries are halves of numbers, or two numbers in one. Convert the tensor, do not reinterpret its bytes.",
    needs="block_tables or slot_mapping",
)
def read_with_another_size(case: Case) -> Seen:
    """Report indices that look like another integer type. vllm-ascend#16775: int64 read as int32."""
    found: list[tuple[str, str] | None] = []
    if case.slots is not None:
        given, columns = case.index("slot_mapping"), np.arange(len(case.slots))
        most = case.num_blocks * case.page_size
        found.append(misread_words("slot_mapping", given, case.slots, columns, most, filled=False))
    if case.page_tables is not None:
        given = case.raw_table[1] if isinstance(case.raw_table, tuple) else case.raw_table
        starts, ids = case.pages.starts, case.pages.ids
        columns = np.arange(len(ids)) - np.repeat(starts[:-1], np.diff(starts))
        filled, most = case.page_tables.placeholder in (0, -1), case.num_blocks * case.page_size
        found.append(misread_words(case.table_name or "", given, ids, columns, most, filled=filled))
    return [each for each in found if each] if found else None


def misread_words(
    name: str, given: np.ndarray, numbers: np.ndarray, columns: np.ndarray, most: int, *, filled: bool
) -> tuple[str, str] | None:
    """Return (where, what) if the numbers in use of an array look like numbers of another size.

    In int64 read as int32 every other number is 0 or -1: 5, 9 are 5, 0, 9, 0. That is no evidence if tables
    are `filled` with such numbers.
    """
    dtype = given.dtype
    if dtype.itemsize == 4 and len(numbers) >= 4 and not filled:
        odd = np.flatnonzero(columns % 2)
        low, high = numbers[odd - 1], numbers[odd]
        stored = low[low >= 0]  # evidence are two other numbers: (-1, -1) may be padding, 0 the first slot
        if (high == np.where(low < 0, -1, 0)).all() and len(np.unique(stored)) > 1:
            seen = numbers[:4].tolist()
            return name, f"every other int32 number is 0 or -1 ({seen}...): int64 read as int32"
    if dtype.itemsize == 8 and len(numbers) and (numbers > np.iinfo(np.uint32).max).any():
        both = np.stack([numbers & 0xFFFFFFFF, numbers >> 32])
        if (both < most).all() and (both >= 0).all():
            return name, f"{numbers[0]} is {both[0, 0]} and {both[1, 0]} together: int32 read as int64"
    return None


@rule(
    "S6",
    "The index overflows, and a wrong address is accessed. Compute addresses in 64 bits.",
    needs="slot_mapping or keys and values",
)
def beyond_the_index_type(case: Case) -> Seen:
    """Report caches for which an index type is too small. vllm#1486: int32 for 64,000 blocks."""
    given, kind = case.index("slot_mapping"), case.source.text("index_type")
    bits = None if kind is None else INDEX_BITS[text("index_type", kind, INDEX_BITS)]
    if case.num_blocks is None or case.page_size is None or (given is None and not case.sides):
        return None
    capacity, found = case.num_blocks * case.page_size, []
    if given is not None and capacity - 1 > np.iinfo(given.dtype).max:
        found.append(("slot_mapping", f"{given.dtype} for the {capacity} slots of the cache"))
    for side in case.sides if bits is not None else ():
        sizes = zip(side.array.shape, side.array.strides, strict=True)
        reach = sum((size - 1) * abs(step) for size, step in sizes)
        last = max(reach // side.array.itemsize, side.array.size - 1)
        if last >> bits:
            found.append((side.label, f"its last element is at {last}, which {kind} cannot represent"))
    return found


@rule(
    "S7",
    "A page's first row is its number times page_size. Multiply or divide once, in one place.",
    needs="block_tables, pages of several rows",
)
def rows_and_pages_mixed(case: Case) -> Seen:
    """Report page numbers for rows, and the reverse. LMCache#4253: a page size of 1600 was read as 64."""
    if (case.pages is None or case.page_size == 1) and case.page_of_tokens is None:
        return None
    found = []
    if case.pages is not None and case.page_size > 1 and len(case.pages.ids):
        ids, size = case.pages.ids, case.page_size
        least, most = ids.min(), ids.max()
        # A table of first rows that holds page numbers: as first rows, pages would overlap.
        are_numbers = case.unit > 1 and not case.aligned and least >= 0 and most < case.num_blocks
        if are_numbers and (np.diff(np.unique(ids)) < size).any():
            found.append((case.entry(0, 0), f"{ids[0]} and all others are page numbers, not first rows"))
        are_rows = case.unit == 1 and least >= 0 and most >= case.num_blocks > most // size
        if are_rows and not (ids % size).any():
            what = f"{ids[0]} and all others are first rows of pages, not their numbers"
            found.append((case.entry(0, 0), what))
    if case.page_of_tokens is not None and case.page_size > 1:
        stored = (case.slots >= 0) & (case.page_of_tokens >= 0)
        offset = case.slot_tokens.positions % case.page_size
        slots, pages = case.slots[stored], case.page_of_tokens[stored]
        wrong = (slots != pages * case.page_size + offset[stored]).any()
        for what, numbers in (("page numbers", pages), ("page number + offset", pages + offset[stored])):
            if wrong and (slots == numbers).all():
                found.append(("slot_mapping", f"all {len(slots)} slots are {what}"))
                break
    return found
