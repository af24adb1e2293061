#!/usr/bin/env bash
# Proves that this checkout works on a machine where nothing was installed before.
#
#   tests/fresh.sh [--base DIR] [--keep] SUITE [COMMAND...]
#
# Makes a minimal Debian of that SUITE (bookworm, trixie) in a temporary directory, clones the
# checkout (what is committed) into it and runs COMMAND there, by default deploy/quickstart.sh.
# Exit code: COMMAND's. The new root is removed at the end, unless --keep is given.
#   --base DIR   keep a pristine root in DIR (made when missing) and start from a copy of it
#   MIRROR=URL   the Debian mirror to use
# Needs root, git and debootstrap. COMMAND runs in namespaces of its own for mounts and processes,
# so nothing of it is left behind, however it ends. The kernel and the network are this machine's.
# pip settings of this machine (configuration files, PIP_* variables and the local directories and
# files that they name), apt's proxy settings and extra certificates are taken along.
set -euo pipefail

CHECKOUT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MIRROR=${MIRROR:-http://deb.debian.org/debian}

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
    exit 2
}

say() { printf 'fresh: %s\n' "$*" >&2; }

make_root() { # SUITE DIR
    local log=$2.log
    say "making a minimal Debian $1"
    mkdir -p "$2"
    debootstrap --variant=minbase "$1" "$2" "$MIRROR" >"$log" 2>&1 || {
        tail -n 20 "$log" >&2
        exit 1
    }
    rm -f "$log"
}

# The files and directories of this machine that its pip settings name, and the setting files.
pip_paths() {
    {
        python3 -m pip config debug 2>/dev/null | sed -n 's/^ *\(.*\), exists: True$/\1/p'
        { python3 -m pip config list 2>/dev/null && env | grep '^PIP_'; } |
            grep -oE "(file://)?/[^ '\",\\\\]+" |
            sed -E 's,^file://,,; s,/simple/?$,,' # an index's files lie beside its simple/
    } | sort -u
}

take_along() { # ROOT
    local path file
    cp -L /etc/resolv.conf "$1/etc/resolv.conf"
    apt-config dump Acquire 2>/dev/null |
        grep -E '^Acquire::(https?::(Proxy|CAInfo)|Check)' >"$1/etc/apt/apt.conf.d/99host" || true
    while read -r path; do
        if [ -f "$path" ]; then
            mkdir -p "$1$(dirname "$path")"
            cp -L "$path" "$1$path"
        fi
    done < <(pip_paths)
    for file in /usr/local/share/ca-certificates/*.crt; do
        [ -e "$file" ] || continue
        mkdir -p "$1/usr/local/share/ca-certificates"
        cp "$file" "$1/usr/local/share/ca-certificates/"
    done
}

# Runs in the new namespaces, as their first process.
inside() { # ROOT COMMAND...
    local root=$1 path
    shift
    mount --make-rprivate /
    mount --bind "$root" "$root"
    mount --rbind /dev "$root/dev"
    mount --rbind /sys "$root/sys"
    mount -t proc proc "$root/proc"
    while read -r path; do
        [ -d "$path" ] || continue
        mkdir -p "$root$path"
        mount --bind -o ro "$path" "$root$path"
    done < <(pip_paths)
    mapfile -t settings < <(env | grep -E '^(PIP_[A-Z_]+|TERM|CI|https?_proxy|no_proxy)=')
    env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        LANG=C.UTF-8 "${settings[@]}" \
        chroot "$root" /bin/bash -c 'cd /root/cachefs && "$@"' fresh "$@"
}

if [ "${1:-}" = --inside ]; then
    shift
    inside "$@"
    exit
fi

base='' keep=''
while [ $# -gt 0 ]; do
    case $1 in
    --base) base=${2:?--base wants a directory}; shift 2 ;;
    --keep) keep=1; shift ;;
    -*) usage ;;
    *) break ;;
    esac
done
[ $# -gt 0 ] || usage
suite=$1
shift
[ $# -gt 0 ] || set -- bash deploy/quickstart.sh
[ "$(id -u)" = 0 ] || { say "must run as root"; exit 1; }
command -v debootstrap >/dev/null || { say "debootstrap is missing: apt-get install debootstrap"; exit 1; }

root=$(mktemp -d "${TMPDIR:-/var/tmp}/cachefs-$suite.XXXXXX")
chmod 755 "$root"
if [ -n "$keep" ]; then
    say "the root will stay in $root"
else
    trap 'rm -rf --one-file-system "$root"' EXIT
fi
if [ -n "$base" ]; then
    [ -e "$base/etc/debian_version" ] || make_root "$suite" "$base"
    cp -a --reflink=auto "$base/." "$root/"
else
    make_root "$suite" "$root"
fi
take_along "$root"
git clone -q --no-hardlinks "$CHECKOUT" "$root/root/cachefs"
say "running in a fresh $suite: $*"
started=$SECONDS
code=0
unshare --mount --pid --fork --kill-child bash "${BASH_SOURCE[0]}" --inside "$root" "$@" || code=$?
say "exit code $code after $((SECONDS - started)) s"
exit "$code"
