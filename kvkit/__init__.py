"""KV-cache operators for numpy arrays: exact to their specifications, as fast as memory."""

from kvkit import dynamic_batching, sources  # noqa: F401  (sources: at import, see there)
from kvkit.errors import DeviceError, KvkitError
from kvkit.static import key_value_cache
from kvkit.version import __version__

__all__ = ["DeviceError", "KvkitError", "__version__", "dynamic_batching", "key_value_cache"]
