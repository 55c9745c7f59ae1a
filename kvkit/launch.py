"""What the static and the dynamic operators share once each has checked its own arguments."""

from kvkit import check, cpu


def append_and_load(fmt, current_key, current_value, cache, scale, layer, step, repeat, shape, out):
    """Append the new tokens and return the contexts read back; arguments are checked but for overlaps."""
    key, value = check.outputs(out, ("key", "value"), shape, fmt)
    given = [("current_key", current_key), ("current_value", current_value)]
    written = check.written_apart(cache, scale, layer, given)
    if out is not None:
        check.apart("out (key)", key, [("out (value)", value), *given, *written])
        check.apart("out (value)", value, [*given, *written])
    store = cpu.transfer.store(current_key, current_value, layer, step)
    load = cpu.transfer.load(key, value, layer, step, repeat, new=out is None)
    cpu.launches.start(store, load)
    return (key, value), (store, load)
