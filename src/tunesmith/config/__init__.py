"""What a person says: the typed sections of run files, and reading them.

``schema`` defines the sections of every command, of reinforcement learning and of supervised
training; ``algorithm``, ``optimizer`` and ``system`` define the largest tables, ``commands`` those
of single commands. ``engines`` says what each value of ``system.engine`` is. ``load`` reads a run
file and overrides, and reports every problem at once; start there.

Stands on ``records`` (redaction, TOML), ``types`` and ``errors``; imports no torch.
"""
