"""Measures on the machine which settings of the system make a run fastest."""
