"""A directory of versions."""
