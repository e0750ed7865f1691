"""What is wrong with a run, read from the files in its directory.

``record`` reads them, ``signs`` makes the numbers that the rules in ``rules.toml`` ask for, ``findings`` applies these.
"""
