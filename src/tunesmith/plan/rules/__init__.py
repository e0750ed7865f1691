"""Refusals: settings that contradict each other or the facts, or that nothing reads."""
