"""Which processes are there: leases in Redis, replicas as this process sees them, Ray Serve's
router.
"""
