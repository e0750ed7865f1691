"""Where a run's metrics go in addition to ``metrics.jsonl``: the port, and an adapter for each
service."""
