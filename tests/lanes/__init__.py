"""The heart of the speed: lanes, the kernel's rules for them, generations, kills of the daemon.

Every test of the passthrough lane asserts that it was that lane and that the daemon saw no read and
no write; where root and kernel have the feature nothing here is skipped for want of it.
"""
