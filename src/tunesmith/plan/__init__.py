"""Derivation of values from settings, model and machine, and refusal of settings that cannot work.

``resolve`` derives all values and refuses what cannot work. It uses, from the bottom up, ``facts``, ``processes``,
``cost``, ``rules``, ``derive`` and ``layout``. ``report`` shows a resolved run as a plan.
"""
