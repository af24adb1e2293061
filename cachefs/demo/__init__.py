"""The demonstration: an embedded store, a realistic checkpoint, and proof that it arrived.

Here lives what `cachefs demo` and the tests need to stand up a real S3 store on this machine. The
product proper never imports this package.
"""
