"""Adapters of packages with data sets and environments, one file each; only here they are
imported."""
