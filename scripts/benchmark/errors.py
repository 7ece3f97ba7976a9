"""The one error that a user is told without a traceback."""


class SystemFailed(RuntimeError):
    """A system cannot be measured: it did not start or does not answer; the message says why."""
