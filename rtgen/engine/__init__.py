"""The engine: the only part that steps streams."""
