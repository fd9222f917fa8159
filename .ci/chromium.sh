#!/bin/sh
# Chromium for the tests of the pages: installs Debian's where there is none. Prints where it lies.
#
# Works as root on a bare Debian 12, without a terminal or stdin. Exit status: 3 cannot install.
set -eu

log=${TMPDIR:-/tmp}/vllm-repro-chromium-apt.log
# Without a font a page has no letters to measure or to show.
packages="chromium fonts-dejavu-core"

say() { echo "chromium.sh: $*" >&2; }

apt_install() {
    # shellcheck disable=SC2086 # a list of words
    DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 \
        apt-get install -y -qq --no-install-recommends $packages </dev/null >>"$log" 2>&1
}

if ! command -v chromium >/dev/null; then
    [ "$(id -u)" = 0 ] || { say "chromium is missing, and installing needs root"; exit 3; }
    command -v apt-get >/dev/null || { say "chromium is missing, and there is no apt-get"; exit 3; }
    say "installing $packages"
    if ! apt_install && ! { apt-get update -qq </dev/null >>"$log" 2>&1 && apt_install; }; then
        tail -n 20 "$log" >&2
        say "apt-get failed"
        exit 3
    fi
fi
command -v chromium
