"""Metadata: what this node knows, in one SQLite database per cache.

Here live the schema (``schema.sql``, whose comments are the authority on every column), the
connection and its transactions (`database`), what keeps a slow disk from holding them up
(`deferral`, `ring`, a layer in C), row types (`rows`) and one module of queries per table. All SQL
text of the project is in this package. What may not live here: decisions about files, effects or
uploads. Callers decide, this package stores and finds.

Invariants
- One connection writes, and only the daemon's trio thread uses it. Every mutation of the
  namespace is one transaction, committed before the reply goes out.
- A commit survives SIGKILL, also while the disk takes nothing (`deferral`). It survives a power cut
  after `Database.sync`.
- Inode, generation and dentry numbers are never reused.
"""

from cachefs.meta.store import Meta

__all__ = ["Meta"]
