"""Who looks at the entries of a directory one after the other waits for the store now and then."""

from __future__ import annotations

from cachefs.vfs.attributes import ROOT
from tests.daemon.lab import Lab, in_lab


def _known(lab: Lab) -> int:
    rows = lab.services.meta.inodes.children(ROOT, 0, 1000)
    return sum(row.attrs_known for _, _, row in rows)


@in_lab()
async def test_entry_by_entry(lab: Lab) -> None:
    """As `ls -l` does: from the second entry on the next ones are asked for together."""
    for number in range(100):
        await lab.bucket.call("put", key=f"f{number:03d}", body=b"x" * 5000, metadata={})
    await lab.parts.refresher.rounds.run(ROOT)
    assert _known(lab) == 0
    await lab.services.namespace.lookup(ROOT, b"f050")
    await lab.services.namespace.lookup(ROOT, b"f020")
    assert _known(lab) == 2, "looking here and there asks for nothing else"
    await lab.services.namespace.lookup(ROOT, b"f021")
    assert _known(lab) == 2 + 63
    for number in range(22, 100):
        await lab.services.namespace.lookup(ROOT, f"f{number:03d}".encode())
    assert _known(lab) == 80
