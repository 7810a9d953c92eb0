"""The exact memory: running sums, their solution, and fixed features."""
