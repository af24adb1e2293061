"""Which lanes the tests run in on this machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import re

OPTIONS = {"tracked": "off", "passthrough": "auto"}
"""Lane -> value of `mount.passthrough`."""


def kernel_has_passthrough() -> bool:
    """Linux 6.9 brought it; it takes root."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    version = tuple(map(int, found.groups())) if found else (0, 0)
    return version >= (6, 9) and os.geteuid() == 0


def product_has_passthrough() -> bool:
    """Whether the extension that adds the lane is part of the checkout."""
    return importlib.util.find_spec("cachefs.fuse.tap") is not None


def chosen() -> list[str]:
    """The lanes that `CACHEFS_TEST_LANES` asks for (comma separated), for every test."""
    asked = os.environ.get("CACHEFS_TEST_LANES")
    return asked.split(",") if asked else []


def to_test() -> list[str]:
    """Those that were asked for, else both where the kernel has both."""
    if asked := chosen():
        return asked
    both = kernel_has_passthrough() and product_has_passthrough()
    return ["tracked", "passthrough"] if both else ["tracked"]
