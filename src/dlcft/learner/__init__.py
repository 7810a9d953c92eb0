"""The one object that users hold."""
