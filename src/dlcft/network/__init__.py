"""What is learned on: networks, linearised or as they are, and the classifier on top."""
