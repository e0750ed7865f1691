"""Diagnoses a run from the files in its directory.

``record`` reads them, ``signs`` computes the numbers that the rules in ``rules.toml`` use, ``findings`` applies these.
"""
