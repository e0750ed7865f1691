"""Sharding and sequence parallelism: a model on several ranks."""

PATIENCE = 120.0
"""Seconds that a rank waits for the others in one sum, and for the group to form. Between CPUs, a
rank that has died is noticed at once, because its connections close."""
