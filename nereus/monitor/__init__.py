"""Signals, triggers and supply."""
