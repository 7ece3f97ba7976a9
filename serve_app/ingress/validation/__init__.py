"""What is validated before any work on a request.

Where a field of a body is checked: `fields.toml` has what it may be (`fields.py` reads it), and
`bodies.py` what it may be beside others and within the limits. vLLM's own request models check a
field without a row, and `workers/schemas.py` whether an engine obeys a JSON schema. What only an
engine knows, such as its vocabulary and what has room, it refuses itself.
"""
