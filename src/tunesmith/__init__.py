"""Tunesmith trains language models after pretraining."""
