"""A private service on this machine: environment, Redis, Ray, deployment. Used by quickstart, tests and bench."""
