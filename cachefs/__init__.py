"""cachefs: a FUSE write-back cache for training checkpoints.

A trainer writes into an ordinary directory, the bytes land on a local disk, and a flusher
uploads them to object storage in an order that never shows a reader a torn checkpoint.

Only the version and the calls for training programs live here. Imports point one way:
``cli -> daemon -> fuse -> vfs -> {flush.queue, cache, meta} -> model`` and
``flush -> {cache, meta, store} -> model``.
"""

__version__ = "0.1.0"


def adopt(source: str, destination: str) -> str:
    """Move a finished file from anywhere into a mount; returns how: link, reflink or copy.

    For a snapshot in RAM, or a file that was written to the cache's disk directly. It appears under
    its new name at once with all its bytes, and is uploaded like any other. Raises
    `cachefs.errors.CachefsError`; then the file is where it was. For root and the daemon's user.
    """
    from cachefs.cli.adopting import move

    return str(move(source, destination)["method"])
