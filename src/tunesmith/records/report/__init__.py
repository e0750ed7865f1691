"""The history of runs as one HTML page.

``metrics`` and ``rollouts`` read growing files incrementally; ``run`` turns a run's directory into
plain JSON; ``page`` puts it into the page, ``server`` answers the page of a live run.
"""
