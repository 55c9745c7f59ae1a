"""The one error for what `kvkit` has and its twin does not have yet."""

from kvkit.errors import DeviceError


def missing(twin, package):
    """The `__getattr__` of a package whose CPU twin is `twin`."""

    def __getattr__(name):
        if name in twin.__all__:
            raise DeviceError(
                f"{package}.{name}: no CUDA kernel is written yet; {twin.__name__}.{name} has one"
            )
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
