"""Suites of cases that `kvkit bench` measures."""
