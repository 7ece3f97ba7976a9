"""A private service on this machine: environment, Redis, Ray, deployment. Used by quickstart, the
tests and the benchmark.
"""
