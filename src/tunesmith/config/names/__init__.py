"""Names that a run file does not have: what other frameworks call the settings, and what to write instead."""
