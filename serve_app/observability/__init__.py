"""What operators see: metrics, their snapshots in Redis, traces and log lines."""
