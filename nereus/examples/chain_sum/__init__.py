"""The quickstart task: sums of a few digits, worked line by line."""
