"""What the product is compared with. Each replaces the planner, the admission or the transition, and nothing else."""
