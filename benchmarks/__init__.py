"""Benchmarks of kvkit: the suites of `kvkit bench`, and scripts."""
