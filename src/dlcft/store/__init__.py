"""A directory of versions: committed whole, kept, read and rolled back to."""
