"""Hard tuples for the losses that need them: which to choose, and the photos to choose from."""
