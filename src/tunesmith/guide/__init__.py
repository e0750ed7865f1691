"""What helps a person beside the trainer: tuning, migration, explanations, simulation.

``tune`` tries settings by real steps, ``migrate`` converts other frameworks' scripts, ``explain``
says what a setting or a metric is, ``names`` knows other frameworks' words, ``simulate`` runs steps
on GPUs that are not there, ``recipes`` holds the demo.

Stands on every wing except ``cli``; none of them needs it.
"""
