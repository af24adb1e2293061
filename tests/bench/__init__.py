"""The load generator: what it writes, what it measures, what it prints."""
