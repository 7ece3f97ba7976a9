#!/bin/sh
# Writes Redis's users from the Secret's passwords, as hashes.
set -eu
umask 077
: "${HERMES_NAMESPACE:?}" "${HERMES_PASSWORD:?}" "${RAY_PASSWORD:?}"

hash() { printf %s "$1" | sha256sum | cut -d ' ' -f 1; }

{
    if [ -n "${REPLICATION_PASSWORD:-}" ]; then
        # With Sentinel: replicas, Sentinels, probes and HAProxy of the chart redis-ha log in as `default`.
        echo "user default on #$(hash "$REPLICATION_PASSWORD") +@all ~* &*"
    else
        # Nobody can log in as `default`. It may do everything all the same: a Redis before 8.4 replays the transactions of its
        # append-only file as this user, and drops what it may not do.
        echo "user default off +@all ~* &*"
    fi
    # The service: its namespace's keys and channels.
    echo "user hermes on #$(hash "$HERMES_PASSWORD") ~$HERMES_NAMESPACE:* resetchannels &$HERMES_NAMESPACE:* -@all +@connection +@stream +@sortedset +@string +@hash +@keyspace +@pubsub +@transaction +@scripting +time -@admin -@dangerous -scan -randomkey +info"
    # Ray's GCS: its own prefix, and the key DUMMY, by which it finds out whether this is a cluster. KEYS, which shows the
    # names of all keys, is for KubeRay's job that cleans up after a deleted cluster.
    echo "user ray on #$(hash "$RAY_PASSWORD") ~RAY* ~DUMMY resetchannels +@all -@admin -@dangerous -scan -randomkey +info +keys"
    # Probes: whether Redis answers, and nothing else.
    echo "user probe on nopass resetchannels +ping"
    if [ -n "${METRICS_PASSWORD:-}" ]; then
        echo "user metrics on #$(hash "$METRICS_PASSWORD") resetchannels +ping +info +slowlog|get +slowlog|len +latency|latest +client|setname"
    fi
} > /run/redis/users.acl
