"""Copies between the cache and the store: the warm tier, and what each tier keeps.

Lives here: writing sealed generations to a directory on a parallel or network filesystem, in an
order that never shows a torn checkpoint there; reading them back in preference to the store; and
retention. May not live here: anything about the bucket, whose order is `flush`'s affair.
"""
