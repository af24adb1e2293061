"""Object stores: the protocol and its implementations.

Here lives everything that talks to a store: the `ObjectStore` protocol (`base`), S3 through boto3
(`s3`), a plain directory (`directory`), checksums of file ranges (`crc`). All of it is synchronous
and runs in mover processes and tests; the daemon itself never imports boto3. What may not live
here: retries and pacing (the flusher owns them), any knowledge of inodes, generations or order.
"""
