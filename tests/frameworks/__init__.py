"""Training frameworks and other real programs on the mount."""
