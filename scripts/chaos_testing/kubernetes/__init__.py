"""`scripts/chaos --kubernetes`: faults on a release of the Helm chart in somebody's own cluster.

In the order of a run: `options` → `cluster` (kubectl and helm) → `release` (what helm knows),
`standing` (which pods are the release's, whether it is whole) → `rights` → `manifests` (the client
pod and its code) → `faults` (each as commands and waits, from `steps`) → `plan` (all of them as
text: `--dry-run`) → `executor` (performs them; `nodes`: which node) → `report` → `command`.

`in_pod` is the client. It runs inside the cluster, because a port-forward ends with its pod.
"""
