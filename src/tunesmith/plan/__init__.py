"""What follows from the settings: values derived from settings, model and machine, and refusals.

``resolve`` derives all values and refuses what cannot work; start there. It uses, from the bottom
up, ``facts``, ``kind``, ``devices``, ``cost``, ``rules``, ``derive`` and ``layout``. ``report`` shows a
resolved run as a plan.

Stands on ``config`` and ``costs``; imports no torch.
"""
