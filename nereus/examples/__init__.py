"""What the demos need and the product does not."""
