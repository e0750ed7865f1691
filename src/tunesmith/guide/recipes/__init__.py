"""Small complete runs that generate their own model and data."""
