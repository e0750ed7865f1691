"""Derivation of values from settings, model and machine, and refusal of settings that cannot work.

``resolve`` derives values and calls ``checks``, whose ``rules`` are data about the values in ``situation``. ``facts``
come from ``hardware`` (or from ``machines``, for a machine given by name), ``hub`` and the data. ``cost`` prices a
layout; ``memory`` and ``capacity`` determine what fits a device, ``gpus`` and ``cluster`` where processes run, and
``weights`` which processes have a copy of the weights.
"""
