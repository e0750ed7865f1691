"""The settings of a run.

``load`` reads a run file and overrides; ``shape`` and ``files`` check values and paths before the sections do.
``schema`` has the sections, with ``algorithm``, ``sampling``, ``system`` (``vllm``, ``placement``) and ``monitor``;
``generation``, ``preference`` and ``distillation`` have those of single commands, and ``kinds`` the configurations by
command. ``section``, ``choice``, ``values`` and ``sizes`` are what sections are made of. ``problems``, ``places``,
``describe``, ``unknown`` and ``foreign`` write the errors. ``resolved`` is a configuration with every value and its
reason.
"""
