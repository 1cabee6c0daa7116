"""Benchmarks: each prints a ratio measured in one run against a named peer. None is a test; their arithmetic has tests."""
