"""From a recipe to a running job."""
