"""The command `hermes`, which the wheel and the images contain: deploy, api-key, dead-letters."""
