"""The settings of a run.

The sections of run files: ``schema`` defines those of every command, of reinforcement learning and of supervised
training; ``algorithm``, ``optimizer``, ``system`` and ``placement`` define the largest tables; ``generation``,
``preference`` and ``distillation`` those of single commands. ``kinds`` lists the configurations by command.

Sections are built from ``section``, ``choice``, ``values`` and ``sizes``.

``load`` reads a run file and overrides: ``reading`` checks values and paths before the sections do, and writes the
errors; ``names`` recognizes names from other frameworks; ``documents`` describes each setting. ``resolved`` holds a
configuration with every value and its reason, and ``toml`` writes it.
"""
