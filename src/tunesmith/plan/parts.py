"""Names for the uses of a device's memory."""

from __future__ import annotations

PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "frozen": "frozen models",
    "gathered": "gathered weights",
    "scorer": "reference or teacher, while it scores",
    "judge": "reward models, while they score",
    "scored": "a pass without gradients",
    "rewarded": "a pass that scores",
    "activations": "activations of a micro-batch",
    "head": "temporaries of a micro-batch",
    "published": "weights in transfer to engines",
    "engine": "the engines' weights",
    "kv": "keys and values",
    "libraries": "CUDA and its libraries",
}
"""Names for the parts of a ``Price``."""
