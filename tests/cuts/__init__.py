"""Power cuts: what is on the disk when the machine goes down at any instant."""
