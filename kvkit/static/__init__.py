"""The operators over static caches: sequences of one length, each with its own part of the cache."""
