"""The commands. Each module declares one command and imports what it runs when it is called; start
in ``main``.

Stands on every other wing but ``guide``, whose commands register at a door (``main``).
"""
