"""The one part of the build that pyproject.toml cannot say: optional C extensions.

``cachefs.fuse._tap`` opens the passthrough lane, ``cachefs.meta._walvfs`` keeps a stalled disk from
holding up changes of metadata. They need a C compiler and Python's headers; libfuse and SQLite are
found at run time. Where the compiler is missing or fails, the install goes on without them: the
tracked lane serves, and changes wait for the disk.
"""

from pathlib import Path

from setuptools import Extension, setup

TAP = Path("cachefs/fuse")
WAL = Path("cachefs/meta")

setup(
    ext_modules=[
        Extension(
            "cachefs.meta._walvfs",
            sources=sorted(str(path) for path in WAL.glob("_wal*.c")),
            depends=sorted(str(path) for path in WAL.glob("_wal*.h")),
            extra_compile_args=["-O2", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        ),
        Extension(
            "cachefs.fuse._tap",
            sources=sorted(str(path) for path in TAP.glob("_tap*.c")),
            depends=sorted(str(path) for path in TAP.glob("_tap*.h")),
            extra_compile_args=["-O2", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        ),
    ]
)
