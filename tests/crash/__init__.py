"""The daemon dies at each step of each mutation, and what it had promised is kept."""
