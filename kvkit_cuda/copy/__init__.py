"""Copy rows on a GPU: append, gather, store by slot, copy blocks."""
