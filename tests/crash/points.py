"""All failpoints by name."""

from __future__ import annotations

from cachefs.failpoints import Change, Point

REQUESTS = (
    *("PUT", "COPY", "DELETE", "CREATE_UPLOAD", "UPLOAD_PART", "COPY_PART", "COMPLETE_UPLOAD"),
    *("ABORT_UPLOAD", "HEAD", "LIST", "GET_BYTES", "GET_INTO", "LIST_UPLOADS", "LIST_PARTS"),
    "PROBE",
)
"""Methods of the store that the daemon calls."""


def names_of(kind: type) -> list[str]:
    return [name for name in vars(kind) if name.isupper()]


def all_points() -> list[str]:
    """Every failpoint of the product."""
    commits = [f"{c}_{when}_COMMIT" for c in names_of(Change) for when in ("BEFORE", "AFTER")]
    requests = [f"{r}_{when}" for r in REQUESTS for when in ("BEFORE_REQUEST", "AFTER_ANSWER")]
    return [*names_of(Point), *commits, *requests]
