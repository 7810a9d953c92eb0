"""Networks to learn on: plain or linearised backbones, and the classifier with its heads."""
