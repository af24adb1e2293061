"""structlog without rich, which it would load for its colours: an eighth of a daemon's start.

Of use where nothing has imported structlog yet. A program that uses rich for itself has it loaded,
or loads it afterwards.
"""

from __future__ import annotations

import sys

_absent = "rich" not in sys.modules
if _absent:
    sys.modules["rich"] = None  # type: ignore[assignment]
try:
    import structlog as structlog
finally:
    if _absent:
        del sys.modules["rich"]
