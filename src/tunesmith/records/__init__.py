"""What is remembered: metrics, sinks, the timeline, run directories.

``metrics`` and ``run_dir`` are the places to start. ``report`` and ``doctor`` read the records of a
run. Files are written through ``storage``, and secrets are hidden by ``redact``.

Stands on ``errors`` alone; imports no torch.
"""
