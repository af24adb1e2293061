"""The filesystem itself: names, handles and open files, as POSIX has them.

Here live the namespace (`namespace`), open inodes and handles (`opened`), what opening, writing and
closing do to generations (`files`, `contents`), the view of directories that so far exist only in
the bucket (`remote`), what the tap made by itself (`smallfiles`) and the virtual attributes
(`virtual`). What may not live here: requests and replies of FUSE, SQL text, access to the store.

Errors are OSError with the errno that a local filesystem would give, or `cachefs.errors`.

Concurrency: everything runs on the trio thread. A method that does not await is atomic. One that
does re-checks what it read before. Lock order: `OpenInode.lock`, then nothing.
"""
