"""What the documents say about settings."""
