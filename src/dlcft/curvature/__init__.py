"""The quadratic memory: losses, blocks, their estimation, merging and penalty."""
