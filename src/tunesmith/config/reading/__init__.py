"""Checks that precede the sections' own, and errors that give each value's place and the valid
values."""
