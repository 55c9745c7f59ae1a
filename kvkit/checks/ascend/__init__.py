"""Checks of the operators over caches in blocks."""
