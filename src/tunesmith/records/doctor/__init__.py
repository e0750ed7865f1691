"""Diagnoses a run from the files in its directory, and while it trains.

``record`` reads the files; ``signs`` and ``columns`` are what the rules read; each rule is a
function in the file of its topic; ``findings`` applies all of them. ``learning`` detects during a
run that it learns nothing.
"""
