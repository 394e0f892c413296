"""What a step learns: advantages, losses, the training loop."""
