"""Layers that mix tokens through a state (convolutions, delta rules, state spaces), over packed
sequences: each starts from a state of its own, and its end is the start of what continues it."""
