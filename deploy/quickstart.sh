#!/usr/bin/env bash
# From a fresh Debian 12 or 13 to a checkpoint in a bucket: installs what is missing, then runs
# `cachefs demo` with the given arguments (--stay leaves it up). Run as root. Run it again: seconds.
set -euo pipefail
# shellcheck source=deploy/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

require_root_and_fuse
set_up demo
exec "$VENV/bin/cachefs" demo "$@"
