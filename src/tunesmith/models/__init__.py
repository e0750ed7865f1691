"""Language models and reward models: loading, attention over forests, layers, heads, adapters,
export.

``parallel`` shards models that do not fit on one device, ``kernels`` computes the same faster,
``cpu`` holds the compiled functions for CPUs. Start in ``causal_lm``.

Stands on ``plan`` (facts of models and CPUs), ``config``, ``types`` and ``costs``.
"""

import logging

# peft imports bitsandbytes in every run, which on some CPUs warns about an optional kernel that
# nothing here uses. It does so when it is imported, so this comes first.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
