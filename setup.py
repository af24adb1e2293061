"""The one part of the build that pyproject.toml cannot say: optional C extensions.

``cachefs.fuse._tap`` opens the passthrough lane, ``cachefs.meta._walvfs`` keeps a stalled disk from
holding up changes of metadata. They need a C compiler and Python's headers; libfuse and SQLite are
found at run time. Where the compiler is missing or fails, the install goes on without them: the
tracked lane serves, and changes wait for the disk.
"""

from pathlib import Path

from setuptools import Extension, setup


def extension(name: str, folder: str, files: str) -> Extension:
    """An optional one, of all the C files in a folder whose names begin like that."""
    return Extension(
        name,
        sources=sorted(map(str, Path(folder).glob(f"{files}*.c"))),
        depends=sorted(map(str, Path(folder).glob(f"{files}*.h"))),
        extra_compile_args=["-O2", "-Wall", "-Wextra", "-pthread"],
        extra_link_args=["-pthread"],
        optional=True,
    )


setup(
    ext_modules=[
        extension("cachefs.meta._walvfs", "cachefs/meta", "_wal"),
        extension("cachefs.fuse._tap", "cachefs/fuse", "_tap"),
    ]
)
