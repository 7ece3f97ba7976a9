"""Which claimed request goes next. Pure."""
