"""Chooses the plan: candidates, memory, cost, calibration, placement, search. Pure: neither torch nor ray."""
