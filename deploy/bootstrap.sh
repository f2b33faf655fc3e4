#!/bin/sh
# Makes a fresh Debian or Ubuntu machine ready for everstep; called by the Makefile.
#   bootstrap.sh venv PYTHON FOLDER   a virtual environment with everything, tests included
#   bootstrap.sh packages             Debian packages that some tests need
set -eu

TORCH="torch==2.13.0" # what the tests run against; pyproject.toml says what else is supported
# The stand-in NVML of the GPU tests is compiled; deploy/devcluster runs a real Slurm.
PACKAGES="gcc libc6-dev slurmctld slurmd slurm-client munge nftables iproute2 util-linux mount
slurmdbd mariadb-server-core mariadb-client-core"

say() { printf 'everstep: %s\n' "$*" >&2; }

missing_packages() {
    for package in "$@"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
            printf '%s ' "$package"
    done
}

# Installs what is missing when it may; otherwise says what to do and fails.
apt_install() {
    command -v dpkg-query >/dev/null || { say "no Debian packages here; install by hand: $*"; return 1; }
    wanted=$(missing_packages "$@")
    [ -n "$wanted" ] || return 0
    if [ "$(id -u)" != 0 ]; then
        say "not root; run: sudo apt-get install $wanted"
        return 1
    fi
    say "installing $wanted"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends $wanted >/dev/null
}

make_venv() {
    python=$1 folder=$2
    command -v "$python" >/dev/null || apt_install python3 python3-venv
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        say "$("$python" --version) is too old, 3.11 or newer is needed: make PYTHON=python3.12"
        exit 1
    }
    "$python" -c 'import ensurepip' 2>/dev/null || apt_install python3-venv
    "$python" -m venv "$folder"
    say "installing into $folder (a few minutes; torch is the largest part)"
    "$folder/bin/pip" install -q --disable-pip-version-check "$TORCH"
    "$folder/bin/pip" install -q --disable-pip-version-check -e '.[dev]'
}

case "${1:-}" in
venv) make_venv "$2" "$3" ;;
packages) apt_install $PACKAGES || say "TESTS THAT NEED $PACKAGES WILL BE SKIPPED" ;;
*) say "usage: bootstrap.sh venv PYTHON FOLDER | packages"; exit 2 ;;
esac
