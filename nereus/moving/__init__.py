"""The only code that changes who holds what: executes transitions, verifies, finds the way back."""
