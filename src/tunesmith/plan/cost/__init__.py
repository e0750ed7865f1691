"""The cost of a run with given settings: operations, bytes of memory by role and phase, seconds by
phase."""
