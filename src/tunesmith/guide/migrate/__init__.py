"""Converts other frameworks' scripts and configurations to run files. The sources are only read,
never run."""
