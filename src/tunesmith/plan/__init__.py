"""What is derived from settings, model and machine, and what is refused.

``resolve`` derives and calls ``checks``, whose ``rules`` are data about the values in ``situation``. ``facts`` come
from ``hardware`` (or ``machines``, where a machine is only named), ``hub`` and the data. ``cost`` prices a layout;
``memory`` and ``capacity`` decide what fits a device, ``gpus`` and ``cluster`` where processes run, ``weights`` who has
a copy of the weights.
"""
