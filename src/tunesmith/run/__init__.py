"""How it runs: the loop, those who train and sample, how weights travel, and where each of them is.

``loop`` trains by ports only; ``trainers``, ``engines`` and ``weights`` hold the ports and their
adapters, ``processes`` the objects in other processes, ``placement`` puts a run together,
``offline`` samples and scores without training. Start in ``loop/rl.py``.

Stands on all wings below ``guide``.
"""
