"""The command `hermes`, which the wheel and the images contain: deploy, api-key, check-redis,
dead-letters, requests, usage.
"""
