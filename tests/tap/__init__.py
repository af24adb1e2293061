"""The tap on real mounts: a toy filesystem under a toy supervisor, killed at will."""
