"""The kernel's side of the daemon: request handlers that decode, call the vfs and encode.

Lives here: the handlers, the guard that turns every exception into an errno, the choice of lanes,
the C tap that adds passthrough and takeover to pyfuse3, and mount(2) itself. May not live here:
what a name or a file means (vfs), SQL, or a store.

New small files are made by the tap alone (`_tap_small.c`), where `smallfiles` lets it: it writes
what it did to a journal, which every handler, control request and comparison with the bucket has
folded into the database before it begins. Whoever looks at names or changes them other than in a
handler calls `gather` first, or enters `held` if it takes its time.

Importing this package imports no pyfuse3: the supervisor uses `kernelmount` alone.
"""
