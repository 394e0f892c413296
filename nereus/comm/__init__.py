"""Stores, process groups and buffers as values. Nothing here knows plans."""
