"""The settings of a run.

The sections of run files, by what they hold: ``schema`` has those of every command, of reinforcement learning and of
supervised training; ``algorithm``, ``optimizer``, ``system`` and ``placement`` their largest tables; ``generation``,
``preference`` and ``distillation`` those of single commands. ``kinds`` has the configurations by command.

What sections are made of: ``section``, ``choice``, ``values`` and ``sizes``.

``load`` makes a configuration of a run file and overrides: ``reading`` checks values and paths before the sections do,
and writes the errors; ``names`` answers names of other frameworks; ``documents`` describes each setting. ``resolved``
is a configuration with every value and its reason, and ``toml`` writes it.
"""
