"""What kvkit raises when it is asked for something it cannot do."""


class KvkitError(ValueError):
    """An argument is wrong. The message names it, what was expected and what came; nothing was written."""


class DeviceError(KvkitError):
    """The asked-for backend cannot run on this machine."""


class CapacityError(KvkitError):
    """A cache of fixed size has no room for the new tokens."""


def wrong(name, expected, got, kind=KvkitError):
    """The one form of an error message."""
    return kind(f"{name}: expected {expected}, got {got}")


def brief(text, most=80):
    """A text from elsewhere as a message may hold it: printable, in one line, and cut."""
    text = str(text)  # of which no more is looked at than can be shown
    shown = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."
