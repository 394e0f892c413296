"""A run as one checked value, and the texts it is written in."""
