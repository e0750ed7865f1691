"""Language models and reward models: loading, adapters, predictions and export."""

import logging

# peft imports bitsandbytes in every run, which on some CPUs warns about an optional kernel that nothing here uses.
# It does so when it is imported, so this comes first.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
