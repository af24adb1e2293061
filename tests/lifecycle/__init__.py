"""Mounts that begin, outlive their daemon, and end: supervisor, `mount` and `unmount`."""
