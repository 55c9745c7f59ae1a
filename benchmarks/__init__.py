"""Benchmarks of kvkit, in its checkout: suites of `kvkit bench`, and scripts."""
