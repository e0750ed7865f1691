"""The settings of a run.

The sections of run files: ``schema`` defines those of every command, of reinforcement learning and of supervised
training; ``algorithm``, ``optimizer`` and ``system`` define the largest tables; ``commands`` those of single commands,
and lists the configurations by command. ``engines`` says what each value of ``system.engine`` is.

Sections are built from ``section``, ``choice`` and ``values``.

``load`` reads a run file and overrides: ``reading`` checks values and paths before the sections do, and writes the
errors; ``names`` recognizes names from other frameworks. ``resolved`` holds a configuration with every value and its
reason, and ``toml`` writes it.
"""
