# Set-up shared by deploy/quickstart.sh and tests/run.sh. Sourced, never run.
#
# What it leaves behind: Debian packages (only those that were missing) and a virtual environment
# in .venv of the checkout. Everything else is the caller's. pip and apt keep this machine's own
# settings: nothing here names an index, a proxy or a mirror.

CHECKOUT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$CHECKOUT/.venv
# Debian's own interpreter, whatever else comes first in PATH.
SYSTEM_PYTHON=${CACHEFS_PYTHON:-/usr/bin/python3}
# C compiler and headers: pyfuse3 comes as source, and so does cachefs' passthrough lane.
SYSTEM_PACKAGES=(fuse3 libfuse3-dev pkg-config gcc libc6-dev python3 python3-dev python3-venv)

say() { printf 'cachefs: %s\n' "$*" >&2; }

die() {
    say "$@"
    exit 1
}

require_root_and_fuse() {
    [ "$(id -u)" = 0 ] || die "must run as root: it mounts a filesystem; try: sudo bash $0"
    [ -c /dev/fuse ] ||
        die "/dev/fuse is missing: load the module (modprobe fuse) or give the container --device /dev/fuse"
    (: <>/dev/fuse) 2>/dev/null ||
        die "/dev/fuse cannot be opened: give the container --device /dev/fuse --cap-add SYS_ADMIN"
}

# step TEXT LOG COMMAND...: one line while COMMAND runs, one when it is done, its output in LOG.
# Its last lines are shown only when it fails.
step() {
    local text=$1 log=$2 started=$SECONDS pid
    shift 2
    "$@" >>"$log" 2>&1 </dev/null &
    pid=$!
    if [ -t 2 ]; then
        while kill -0 "$pid" 2>/dev/null; do
            printf '\rcachefs: %s ... %d s ' "$text" $((SECONDS - started)) >&2
            sleep 0.5
        done
    else
        say "$text ..."
    fi
    if wait "$pid"; then
        [ ! -t 2 ] || printf '\r\033[K' >&2
        say "$text: done in $((SECONDS - started)) s"
        return 0
    fi
    [ ! -t 2 ] || printf '\n' >&2
    say "$text: failed. The end of $log:"
    tail -n 25 "$log" >&2
    return 1
}

missing_packages() {
    local package
    for package in "${SYSTEM_PACKAGES[@]}"; do
        [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
            printf '%s\n' "$package"
    done
}

apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    # A freshly booted machine is often still busy with its own unattended upgrade: wait for it.
    local options=(-q -y -o DPkg::Lock::Timeout=300)
    apt-get "${options[@]}" update || return
    apt-get "${options[@]}" install --no-install-recommends "$@"
}

ensure_system_packages() {
    command -v dpkg-query >/dev/null || die "this set-up is for Debian 12 and 13; see README.md, 'By hand'"
    local missing
    mapfile -t missing < <(missing_packages)
    [ ${#missing[@]} = 0 ] || step "installing ${missing[*]}" "$1" apt_install "${missing[@]}"
}

# Everything that decides what an installation looks like: a change of any of it installs anew.
setup_fingerprint() {
    {
        printf '%s\n' "$CHECKOUT" "$("$SYSTEM_PYTHON" -VV)"
        cd "$CHECKOUT" && cat pyproject.toml setup.py constraints.txt \
            cachefs/fuse/_tap*.[ch] cachefs/meta/_wal*.[ch] 2>/dev/null
    } | sha256sum | cut -c 1-32
}

# stamp_is_current FINGERPRINT NAME...: was each of these extras installed from these very files?
stamp_is_current() {
    local fingerprint=$1 name
    shift
    [ -x "$VENV/bin/python" ] || return 1
    for name in "$@"; do
        [ "$(cat "$VENV/stamps/$name" 2>/dev/null)" = "$fingerprint" ] || return 1
    done
}

make_venv() {
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        "$SYSTEM_PYTHON" -m venv --clear "$VENV"
    fi
}

install_checkout() {
    (
        set -e
        make_venv
        cd "$CHECKOUT"
        "$VENV/bin/python" -m pip install --disable-pip-version-check -e ".[$1]" -c constraints.txt
    )
}

# install_cachefs EXTRA...: the checkout, editable, in .venv; nothing to do when it is current.
install_cachefs() {
    local fingerprint name extras log=$1
    shift
    fingerprint=$(setup_fingerprint)
    stamp_is_current "$fingerprint" "$@" && return 0
    extras=$(IFS=, && echo "$*")
    step "installing cachefs[$extras] into .venv" "$log" install_checkout "$extras" || return
    mkdir -p "$VENV/stamps"
    for name in "$@"; do
        printf '%s\n' "$fingerprint" >"$VENV/stamps/$name"
    done
}

# set_up EXTRA...: from a bare Debian to a working .venv. Two at once take turns.
set_up() {
    local log
    log=$(mktemp "${TMPDIR:-/tmp}/cachefs-setup.XXXXXX") || return
    (
        flock 9
        ensure_system_packages "$log" && check_python && install_cachefs "$log" "$@"
    ) 9>"$CHECKOUT/.venv.lock" || return
    rm -f "$log"
}

check_python() {
    "$SYSTEM_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$SYSTEM_PYTHON is older than Python 3.11; name a newer one with CACHEFS_PYTHON=..."
}

# The framework tests want torch. Only the small CPU build will do, and not every package index
# has it: without it those tests are skipped, and this says so.
install_torch() {
    local requirements=$CHECKOUT/tests/frameworks.txt log fingerprint
    fingerprint=$(cat "$requirements" "$CHECKOUT/constraints.txt" | sha256sum | cut -c 1-32)
    stamp_is_current "$fingerprint" frameworks && return 0
    log=$(mktemp "${TMPDIR:-/tmp}/cachefs-torch.XXXXXX") || return
    say "installing torch for the framework tests ..."
    if "$VENV/bin/python" -m pip install --disable-pip-version-check -q \
        -r "$requirements" -c "$CHECKOUT/constraints.txt" >"$log" 2>&1; then
        mkdir -p "$VENV/stamps"
        printf '%s\n' "$fingerprint" >"$VENV/stamps/frameworks"
    else
        say "no CPU build of torch to be had ($(tail -n 1 "$log")): framework tests will be skipped"
    fi
    rm -f "$log"
}

make_framework_venv() { # DIRECTORY REQUIREMENTS
    "$SYSTEM_PYTHON" -m venv --clear "$1" &&
        "$1/bin/python" -m pip install --disable-pip-version-check -q -r "$2"
}

# The frameworks of the tests marked frameworks_all, in an environment of their own: they are
# heavy, and their versions are nobody else's business.
install_frameworks() {
    local requirements=$CHECKOUT/tests/frameworks_all.txt log venv=$CHECKOUT/.venv-frameworks
    cmp -s "$requirements" "$venv/installed.txt" && return 0
    log=$(mktemp "${TMPDIR:-/tmp}/cachefs-frameworks.XXXXXX") || return
    step "installing training frameworks into .venv-frameworks" "$log" \
        make_framework_venv "$venv" "$requirements" || return
    cp "$requirements" "$venv/installed.txt"
    rm -f "$log"
}
