#!/usr/bin/env bash
# The tests from nothing: installs what is missing, then runs pytest with the given arguments.
# Run as root: the tests mount. Without arguments everything runs but the soak and bench tests, in
# four processes, since tests wait for something two fifths of their time; those that hardly depend
# on the lane run in one of the two (in both with CACHEFS_TEST_LANES=tracked,passthrough). With
# arguments: what pytest does with them.
#   bash tests/run.sh -m frameworks_all    # Hugging Face, Lightning, Orbax, TensorBoard: 2 GB more
set -euo pipefail
# shellcheck source=deploy/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../deploy/lib.sh"

# Programs that are let loose on a mount; a test whose program is missing would be skipped.
SYSTEM_PACKAGES+=(dbench e2fsprogs fio git mount rsync sqlite3 stress-ng tar xfsprogs)
require_root_and_fuse
set_up demo test
install_torch
case " $* " in *frameworks_all*) install_frameworks ;; esac
cd "$CHECKOUT"
# Every process of the product would compile its code again: 0.3 s each, and there are thousands.
unset PYTHONDONTWRITEBYTECODE
[ $# -gt 0 ] || set -- -n 4 --dist loadgroup --no-loadscope-reorder
exec "$VENV/bin/python" -m pytest "$@"
