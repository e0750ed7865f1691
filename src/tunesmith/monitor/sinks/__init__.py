"""Where the numbers of a run go beside ``metrics.jsonl``: the port, and an adapter for each service."""
