"""The quadratic memory inside other libraries' training loops: Lightning, transformers, Avalanche."""
