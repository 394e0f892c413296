"""What a plan costs: seconds and bytes, counted from shapes and learned from runs."""
