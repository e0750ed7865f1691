"""Diagnoses a run from the files in its directory, and while it trains.

``record`` reads the files, ``signs`` computes the numbers that the rules in ``rules.toml`` use, ``findings`` applies
these. ``learning`` detects during a run that it learns nothing.
"""
