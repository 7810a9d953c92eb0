"""One update of a model in use."""
