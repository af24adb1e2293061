"""The mount against a local directory: the same operations must have the same results."""
