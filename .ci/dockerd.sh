#!/bin/sh
# A Docker Engine for CI: uses the one that answers, else installs and starts a private one.
#
#   DOCKER_HOST=$(.ci/dockerd.sh start)   # prints the host of an engine that answers
#   eval "$(.ci/dockerd.sh env)"          # the same host as an export line, without starting anything
#   .ci/dockerd.sh stop                   # ends only the dockerd that `start` started
#
# DOCKER_HOST    used as it is when it answers
# DOCKERD_DIR    state folder of the private engine (default /tmp/vllm-repro-dockerd-UID)
# DOCKERD_PATH   put in front of PATH for dockerd alone, e.g. a folder with a stub nvidia-container-runtime-hook
#
# Works as root on a bare Debian 12, without a terminal or stdin. Exit status: 3 cannot install, 4
# cannot start.
set -eu

dir=${DOCKERD_DIR:-/tmp/vllm-repro-dockerd-$(id -u)}
own=unix://$dir/docker.sock
pidfile=$dir/dockerd.pid
log=$dir/dockerd.log
packages="docker.io iptables iproute2 cgroupfs-mount ca-certificates curl"

say() { echo "dockerd.sh: $*" >&2; }

# Without the docker CLI: the machine may have none, or one that is newer than the engine.
answers() {
    case $1 in
        unix://*) set -- --unix-socket "${1#unix://}" http://localhost/_ping ;;
        tcp://*) set -- "http://${1#tcp://}/_ping" ;;
        *) return 1 ;;
    esac
    [ "$(curl -s -m 3 "$@" 2>/dev/null)" = OK ]
}

# Arguments of a process, one a line; nothing for a zombie or a process that is gone.
args_of() { { tr '\0' '\n' <"/proc/$1/cmdline"; } 2>/dev/null || true; }

# A pid file outlives its process, and pids are used again.
is_ours() { [ -n "$1" ] && args_of "$1" | grep -qxF -- "$own"; }

# Without zombies: where nobody reaps them, an ended dockerd keeps its name.
running_dockerds() {
    for proc in /proc/[0-9]*; do
        [ "$(cat "$proc/comm" 2>/dev/null)" = dockerd ] || continue
        if [ -n "$(args_of "${proc#/proc/}")" ]; then echo "${proc#/proc/}"; fi
    done
}

# One engine a machine: a second one with default arguments shares docker0, its addresses and the
# iptables chains of the first. So an engine that runs here on a socket of its own is used too.
find_engine() {
    for host in ${DOCKER_HOST:-} "$own" unix:///var/run/docker.sock; do
        if answers "$host"; then echo "$host"; return 0; fi
    done
    for pid in $(running_dockerds); do
        for host in $(args_of "$pid" | sed -n 's/^\(-H=\|--host=\)\{0,1\}\(unix:\/\/.*\)$/\2/p'); do
            if answers "$host"; then echo "$host"; return 0; fi
        done
    done
    return 1
}

apt_install() {
    # shellcheck disable=SC2086 # a list of words
    DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 \
        apt-get install -y -qq --no-install-recommends $packages </dev/null >>"$dir/apt.log" 2>&1
}

install_engine() {
    if command -v dockerd >/dev/null && command -v curl >/dev/null; then return 0; fi
    [ "$(id -u)" = 0 ] || { say "dockerd or curl is missing, and installing needs root"; return 3; }
    command -v apt-get >/dev/null || { say "dockerd or curl is missing, and there is no apt-get"; return 3; }
    say "installing $packages"
    # Without this the package starts an engine of its own, on the system's socket.
    policy=/usr/sbin/policy-rc.d
    made_policy=
    if [ ! -e $policy ]; then
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod 755 $policy
        made_policy=1
    fi
    installed=
    if apt_install; then
        installed=1
    elif apt-get update -qq </dev/null >>"$dir/apt.log" 2>&1 && apt_install; then
        installed=1
    fi
    [ -z "$made_policy" ] || rm -f $policy
    if [ -z "$installed" ]; then tail -n 20 "$dir/apt.log" >&2; say "apt-get failed"; return 3; fi
}

# systemd mounts cgroups; a container or a bare VM may not have them.
mount_cgroups() {
    if [ -f /sys/fs/cgroup/cgroup.controllers ] || [ -d /sys/fs/cgroup/memory ]; then return 0; fi
    cgroupfs-mount || say "cgroupfs-mount failed; dockerd will say whether it matters"
}

# The containerd of a killed dockerd may live on, or stay a zombie that nobody reaped. The next
# dockerd takes either for "still running", waits 15 s and gives up. So it is ended, and its pid
# file dropped.
end_stale_containerd() {
    stale=$dir/exec/containerd/containerd.pid
    containerd=$(cat "$stale" 2>/dev/null || true)
    if [ -n "$containerd" ] && args_of "$containerd" | grep -qxF -- "$dir/exec/containerd/containerd.toml"; then
        end "$containerd" 100
    fi
    rm -f "$stale"
}

# TERM, then KILL after $2 tenths of a second. A zombie has no arguments and counts as ended.
end() {
    kill -TERM "$1" 2>/dev/null || return 0
    tenths=0
    while [ -n "$(args_of "$1")" ] && [ $tenths -lt "$2" ]; do sleep 0.1; tenths=$((tenths + 1)); done
    if [ -n "$(args_of "$1")" ]; then
        say "pid $1 did not end in $(($2 / 10)) s, killing it"
        kill -KILL "$1" 2>/dev/null || true
    fi
}

start() {
    mkdir -p "$dir"
    if host=$(find_engine); then say "using the engine at $host"; echo "$host"; return 0; fi
    install_engine || return $?
    # curl may have been missing until now.
    if host=$(find_engine); then say "using the engine at $host"; echo "$host"; return 0; fi
    foreign=$(running_dockerds | tr '\n' ' ')
    if [ -n "$foreign" ]; then
        say "a dockerd runs here and does not answer (pid $foreign): a second one would break its network"
        return 4
    fi
    mount_cgroups
    rm -f "$pidfile" "$dir/docker.sock"
    end_stale_containerd
    : >"$log"
    # A session of its own: the end of the CI step that started it must not end it.
    PATH=${DOCKERD_PATH:+$DOCKERD_PATH:}$PATH setsid dockerd --data-root "$dir/data" --exec-root "$dir/exec" \
        --pidfile "$pidfile" --host "$own" </dev/null >>"$log" 2>&1 &
    launcher=$!
    tenths=0
    while [ $tenths -lt 600 ]; do
        if answers "$own"; then say "engine started, pid $(cat "$pidfile")"; echo "$own"; return 0; fi
        if ! kill -0 $launcher 2>/dev/null; then break; fi
        sleep 0.1
        tenths=$((tenths + 1))
    done
    tail -n 20 "$log" >&2
    say "no engine after $((tenths / 10)) s; log: $log"
    return 4
}

stop() {
    pid=$(cat "$pidfile" 2>/dev/null || true)
    if ! is_ours "$pid"; then say "no engine of mine is running"; return 0; fi
    end "$pid" 300
    end_stale_containerd
    rm -f "$pidfile" "$dir/docker.sock"
    say "stopped pid $pid; its data stay in $dir/data"
}

case ${1:-} in
    start) start ;;
    env)
        host=$(find_engine) || { say "no engine answers; try: $0 start"; exit 4; }
        echo "export DOCKER_HOST=$host" ;;
    stop) stop ;;
    *) echo "usage: $0 start|env|stop" >&2; exit 64 ;;
esac
