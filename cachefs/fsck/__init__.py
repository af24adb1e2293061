"""Checking a cache directory that no daemon uses, mending it, getting files out of a broken one.

What lives here: the checks of cache files against their metadata (`files`, `content`; those of the
database alone are a table in `meta.invariants`), what ties them together (`check`), and getting
files out when the database is beyond repair (`salvage`, with `carve` for a database that SQLite
refuses). What may not: anything a running daemon does.

Laws: a check changes nothing, it works on a copy of the database. Mending changes rows and sets
files aside, in `salvaged/` of the cache directory; it never deletes what might be data.
"""
