"""What helps a person beside the trainer: tuning, migration, explanations, simulation.

``tune`` tries settings by real steps, ``migrate`` converts other frameworks' scripts, ``explain``
says what a setting or a metric is, ``names`` knows other frameworks' words, ``simulate`` runs steps
on GPUs that are not there, ``recipes`` holds the demo.

Stands on every wing; none of them needs it. Start in ``tune/tuning.py``, or where a command is,
in ``commands``. What the trainer uses of it registers at a door
(``config.doors``): answers to unknown keys, commands, dry runs, uploads to the hub.
"""
