"""Processes, groups and transport; the only place, with engines, that touches devices."""
