"""Tunesmith and its peers, measured side by side: ``python -m benchmarks.run``."""
