"""What follows from the settings: values derived from settings, model and machine, and refusals.

``resolve`` derives all values and refuses what cannot work; start there. ``kind`` answers what a
run is, ``devices`` what its processes share; a ``plan`` has both, and the planner's candidates are
plans. ``cost`` prices them, ``layout`` and ``derive`` choose among them, ``rules`` refuse, and
``report`` shows.

Stands on ``config``, ``records`` (files, texts), ``types`` and ``costs``; imports no torch.
"""
