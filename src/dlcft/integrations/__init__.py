"""Beside the tools that people already use; each file is imported only when asked for."""
