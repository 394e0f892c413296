"""Tensor- and pipeline-parallel computation of one unit."""
