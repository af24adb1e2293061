"""The product from end to end: command line, mount, bucket, metrics, restarts, a failing store."""
