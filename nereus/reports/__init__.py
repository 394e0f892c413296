"""What people and files see of a run: events, the live view, tables."""
