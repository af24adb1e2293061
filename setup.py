"""The one part of the build that pyproject.toml cannot say: an optional C extension.

``cachefs.fuse._tap`` opens the passthrough lane. It needs a C compiler and Python's headers;
libfuse is found at run time. Where the compiler is missing or fails, the install goes on without
the extension and the tracked lane serves.
"""

from pathlib import Path

from setuptools import Extension, setup

TAP = Path("cachefs/fuse")

setup(
    ext_modules=[
        Extension(
            "cachefs.fuse._tap",
            sources=sorted(str(path) for path in TAP.glob("_tap*.c")),
            depends=sorted(str(path) for path in TAP.glob("_tap*.h")),
            extra_compile_args=["-O2", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
