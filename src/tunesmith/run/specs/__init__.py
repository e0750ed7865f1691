"""Small descriptions of a run's parts, made from its plan, that travel to the process which builds
the part."""
