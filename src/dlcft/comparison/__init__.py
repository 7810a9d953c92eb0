"""Which method to take, before anything is decided: cross-validation on some of a user's data."""
