#!/bin/sh
# hlatctl from one file on shared storage: `hlatctl ARGUMENTS`. Its first use on a node installs bundle.tar on the node's
# own disk, below HLATCTL_LOCAL_DIR (default: TMPDIR, or /tmp). Jobs start their Python on every node through the link
# hlatctl-python, which does the same.
set -eu
fail() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 1; }
here=$(CDPATH='' cd -- "$(dirname -- "$(realpath -- "$0")")" && pwd)
disk=${HLATCTL_LOCAL_DIR:-${TMPDIR:-/tmp}}/hlatctl-$(id -u)
env=$disk/$(printf %.16s @ARCHIVE_SHA256@)
# In a folder for all users, another one could have made it before.
(umask 077 && mkdir -p "$disk")
[ -O "$disk" ] && [ ! -L "$disk" ] && [ -z "$(find "$disk" -prune -perm /022)" ] ||
  fail "$disk: another user owns it or may write to it" "export HLATCTL_LOCAL_DIR=/another/local/disk"
if [ ! -e "$env/.complete" ]; then
  exec 9>"$disk/.lock"
  flock 9 # one of several processes on this node installs
  if [ ! -e "$env/.complete" ]; then
    work=$(mktemp -d "$disk/new.XXXXXXXX")
    trap 'rm -rf "$work"' EXIT
    printf 'hlatctl: installing on the disk of %s, once\n' "$(uname -n)" >&2
    rm -rf "$env"
    printf '%s  %s\n' @ARCHIVE_SHA256@ "$here/bundle.tar" | sha256sum --check --status ||
      fail "$here/bundle.tar: was altered" "copy the bundle again"
    tar -xf "$here/bundle.tar" -C "$work"
    sh "$work/@NAME@/install.sh" "$env" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
    : >"$env/.complete"
    rm -rf "$work"
    trap - EXIT
  fi
  exec 9>&-
fi
export HLATCTL_PYTHON="$here/hlatctl-python"
case $0 in
*hlatctl-python) exec "$env/bin/python" "$@" ;;
*) exec "$env/bin/hlatctl" "$@" ;;
esac
