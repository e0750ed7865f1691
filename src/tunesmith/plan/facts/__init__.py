"""What is known before a run starts: hardware, named machines, models, and what was measured on
this machine."""
