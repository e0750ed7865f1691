"""Small complete runs that make their own model and data."""
