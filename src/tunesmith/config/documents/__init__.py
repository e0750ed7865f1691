"""What the documentation says about settings."""
