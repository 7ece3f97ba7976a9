#!/bin/sh
# Writes Redis's users, runs redis-server, and starts it again when a signal has killed it.
#
# The kubelet would start it again, too, but waits longer after each time: 10 s, 20 s, 40 s, up to 5 min. Here it is back at
# once. What ends by itself is not started again: a configuration error, a full disk and SHUTDOWN are the kubelet's, which
# reports them. So is a Redis that is killed again and again soon after its start.
#
# The OOM killer: on nodes with cgroup v2 (Kubernetes 1.28 and newer) it kills every process of the container, this script
# included, and the kubelet starts the container again (OOMKilled). On cgroup v1 it kills redis-server alone, as here.
# A child that rewrites the append-only file ends within a second after its parent; it writes to a temporary file only. Redis
# never removes that file, and each may be as large as all data: this script does.
set -eu
SHORT_S=60  # a Redis that lived for less than this
SHORT_LIVES=5  # so many times in succession is left to the kubelet and its back-off

pid=
stopping=
stop() {
    stopping=yes
    [ -n "$pid" ] || return 0
    while kill -TERM "$pid" 2>/dev/null; do sleep 1; done &  # a Redis that begins may lose the first
}
trap stop TERM INT

sh "$(dirname "$0")/users.sh"
short=0
while [ -z "$stopping" ]; do
    rm -f /data/temp-rewriteaof-*.aof
    began=$(date +%s)
    redis-server /etc/redis/redis.conf &
    pid=$!
    [ -z "$stopping" ] || stop  # the signal came between the two lines
    while :; do  # a signal to this script interrupts `wait`
        wait "$pid" && status=0 || status=$?
        kill -0 "$pid" 2>/dev/null || break
    done
    [ -z "$stopping" ] || exit "$status"
    [ "$status" -gt 128 ] || exit "$status"
    if [ $(($(date +%s) - began)) -lt "$SHORT_S" ]; then short=$((short + 1)); else short=0; fi
    if [ "$short" -ge "$SHORT_LIVES" ]; then
        echo "redis-server was killed $short times, each time less than $SHORT_S s after its start: leaving it to the kubelet" >&2
        exit "$status"
    fi
    echo "redis-server was killed by signal $((status - 128)): starting it again" >&2
done
