"""The local cache: devices and their cache files, space, eviction, reads from the store.

What lives here: cache devices (one directory each, one cache file per generation), the ledger of
the space on each, the choice of a device for a new file, the reaper that makes room and the filler
that brings objects into cache files. What may not: names, inodes and handles (vfs), SQL (meta),
requests to a store (they are injected as awaitables), the decision to upload (flush).

`device` and what it is made of (`lock`, `heartbeat`, `clone`, `lease`, `system`) are synchronous:
plain system calls on a local filesystem, errors are `OSError`. `ledger`, `reaper` and `filler`
belong to the trio thread.
"""
