"""Mixtures of experts: which experts tokens choose, and how evenly."""
