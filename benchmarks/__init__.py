"""Ratios against the other libraries, both sides in one run: `python -m benchmarks [name ...]`."""
