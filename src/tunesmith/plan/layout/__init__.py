"""The layouts that a run can have on a machine, the choice among them, and what to change if none
fits."""
