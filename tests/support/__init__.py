"""What the tests share: real mounts, client processes, views of the bucket, log checks.

No test lives here, and nothing here imports the daemon: tests see the product from outside.
"""
