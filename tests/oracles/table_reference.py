"""Oracle of the rules of page tables: what is wrong with lists of pages, by comparing all of them."""


def wrong_entries(sequences, num_blocks, placeholder=None):
    """Return the rules that some entry breaks, from lists of the pages in use."""
    broken = set()
    for b, pages in enumerate(sequences):
        for c, page in enumerate(pages):
            if page == placeholder:
                continue
            if not 0 <= page < num_blocks:
                broken.add("P1")
                continue
            if page in pages[:c]:
                broken.add("P2")
            for other in sequences[:b]:
                for d, same in enumerate(other):
                    if same != page or page in pages[:c] or page in other[:d]:
                        continue
                    begin, end = pages[:c], other[:d]
                    if len(begin) != len(end) or any(
                        x != y and placeholder not in (x, y) for x, y in zip(begin, end, strict=True)
                    ):
                        broken.add("P3")
    return broken
