"""What is learned: the mathematics, the data and the tasks, without a word about how they run.

``algorithms`` holds a class per loss, estimator and correction, ``data`` the way from files to a
``Batch`` and its micro-batches, ``rewards`` and ``environments`` the tasks, ``usercode`` the
running of a user's code within deadlines. Start in ``algorithms/objective.py``.

Stands on ``models`` (forests), ``config``, ``records`` (HTTP, waits, files), ``types`` and
``costs``.
"""
