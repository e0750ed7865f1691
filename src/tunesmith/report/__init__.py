"""What runs did, as one HTML page.

``metrics`` and ``rollouts`` read the files that grow, from where they were read to; ``run`` makes plain JSON of a run's
directory; ``page`` puts it into the page, ``server`` answers the page of a run that goes on.
"""
