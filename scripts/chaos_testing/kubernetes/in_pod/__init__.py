"""The client of `scripts/chaos --kubernetes`, which runs in a pod of the service's image: `serve`
is its process; every other command (`control`) is a word to that process, by `kubectl exec`.

`rounds` streams and keeps the account of each round, `texts` says which text is right.
"""
