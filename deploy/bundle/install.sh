#!/bin/sh
# Installs @NAME@ into a new virtual environment, without a network:
#     sh install.sh FOLDER
# PYTHON=/path/to/python@PYTHON@ names the Python to use. Altered files are refused.
set -eu
fail() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 1; }
[ $# = 1 ] || fail "install.sh needs one argument, the folder to create" "sh install.sh \$HOME/hlatctl"
case $1 in /*) to=$1 ;; *) to=$PWD/$1 ;; esac
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
[ ! -e "$to" ] || fail "$to: exists already" "name a new folder, or remove this one"
python=${PYTHON:-python@PYTHON@}
command -v "$python" >/dev/null || fail "$python: is not on this machine" \
  "load your site's module of Python @PYTHON@, or set PYTHON=/path/to/python@PYTHON@"
umask 022
"$python" -I - "$here" <<'CHECK' || exit 1
import hashlib, os, platform, sys

def refuse(problem, hint):
    sys.exit(f"error: {problem}\nhint: {hint}")

here = sys.argv[1]
if sys.version_info[:2] != tuple(map(int, "@PYTHON@".split("."))):
    refuse(f"{sys.executable} is Python {platform.python_version()}, these wheels are for @PYTHON@",
           "set PYTHON=/path/to/python@PYTHON@, or make the bundle with PYTHON=%d.%d" % sys.version_info[:2])
if platform.machine() != "@MACHINE@":
    refuse(f"this machine is {platform.machine()}, these wheels are for @MACHINE@",
           "make the bundle with PLATFORM=manylinux_2_@GLIBC@_%s" % platform.machine())
name, version = platform.libc_ver()
if name != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, int("@GLIBC@")):
    refuse(f"this machine has {name or 'no glibc'} {version}, these wheels need glibc 2.@GLIBC@",
           "make the bundle with an older PLATFORM, or use a container (docs/start/offline.md)")
for file, expected in {"requirements.txt": "@REQUIREMENTS_SHA256@", "@PIP@": "@PIP_SHA256@"}.items():
    try:
        with open(os.path.join(here, file), "rb") as opened:
            found = hashlib.sha256(opened.read()).hexdigest()
    except OSError as error:
        refuse(f"{file}: {error.strerror}", "unpack the bundle again")
    if found != expected:
        refuse(f"{file}: was altered (its SHA-256 is {found}, expected {expected})", "copy the bundle again")
CHECK
parent=$to
while [ ! -d "$parent" ]; do parent=$(dirname "$parent"); done
free() { df "$1" -- "$parent" 2>/dev/null | awk 'NR == 2 { print $4 }'; } # nothing where a file system doesn't say
kib=$(free -Pk) inodes=$(free -Pi)
case $kib in '' | *[!0-9]*) ;; *) [ "$kib" -ge @NEEDED_KIB@ ] || fail "$parent: has $((kib / 1024)) MiB left, @NEEDED_MIB@ are needed" "name a folder on another disk" ;; esac
# Some file systems (btrfs) say 0 for: no limit.
case $inodes in '' | 0 | *[!0-9]*) ;; *) [ "$inodes" -ge @NEEDED_FILES@ ] || fail "$parent: has room for $inodes files, @NEEDED_FILES@ are needed" "name a folder on another disk, or run hlatctl from the bundle's single file (docs/start/offline.md)" ;; esac
complete=no
trap '[ $complete = yes ] || rm -rf "$to"' EXIT
trap 'exit 1' INT TERM HUP
"$python" -I -m venv --without-pip "$to"
# Neither pip's configuration nor its variables count, so that it can ask no index. It needs some HOME.
HOME=${HOME:-$to} PIP_CONFIG_FILE=/dev/null "$to/bin/python" -I "$here/@PIP@/pip" --isolated --quiet --disable-pip-version-check install \
  --no-index --find-links "$here/wheels" --only-binary :all: --no-deps --require-hashes --no-cache-dir \
  --requirement "$here/requirements.txt" ||
  fail "pip could not install the wheels (above is why); nothing is left of $to" \
    "if wheels were altered, copy the bundle again; if a quota was reached, see docs/start/offline.md"
complete=yes
printf 'hlatctl is in %s: %s files and folders\n' "$to" "$(find "$to" | wc -l)" >&2
printf 'run:  . %s/bin/activate\n' "$to" >&2
