"""From dirty to durable: the effect queue, the flusher that uploads and commits, the movers.

Here lives what decides which bytes go to the store, when and in which order, and the processes that
carry them (`movers` in the daemon, `mover` in the process). It never imports `vfs` or `fuse`, and
the daemon's side never imports boto3: every request to the store is a job for a mover.
"""
