"""Measures on the machine which system settings make a run fastest."""
