"""A request from its queue entry to its end: claim, order, attempts, adoption, quarantine."""
