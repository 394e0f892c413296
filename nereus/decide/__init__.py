"""When to adapt and whether it pays: recorded inputs in, a ruling out. Pure."""
