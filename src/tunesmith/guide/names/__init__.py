"""Names that are not settings of a run file: other frameworks' names for settings, and what to
write instead."""
