"""Real programs on the mount: each must do exactly what it does on a local disk."""
