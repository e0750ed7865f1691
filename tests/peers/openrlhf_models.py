"""OpenRLHF's ``models/loss.py`` and ``models/utils.py``, loaded as they are without their package's
``__init__``.

That ``__init__`` imports the actor and with it flash-attn, which is built for one GPU and CUDA
version; neither file below needs it.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path

_NAME = "openrlhf_models_without_actor"


def _package() -> str:
    """A package over the same folder that has no ``__init__``, so that the files' relative imports
    hold."""
    if _NAME not in sys.modules:
        found = find_spec("openrlhf")
        assert found is not None and found.submodule_search_locations
        spec = ModuleSpec(_NAME, None, is_package=True)
        spec.submodule_search_locations = [
            str(Path(next(iter(found.submodule_search_locations))) / "models")
        ]
        sys.modules[_NAME] = module_from_spec(spec)
    return _NAME


loss = importlib.import_module(f"{_package()}.loss")
utils = importlib.import_module(f"{_package()}.utils")
