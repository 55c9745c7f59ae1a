"""What kvkit raises when it is asked for something it cannot do."""


class KvkitError(ValueError):
    """An argument is wrong. The message names it, what was expected and what came; nothing was written."""


class DeviceError(KvkitError):
    """The asked-for backend cannot run on this machine."""


class CapacityError(KvkitError):
    """A cache of fixed size has no room for the new tokens."""
