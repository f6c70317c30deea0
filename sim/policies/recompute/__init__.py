"""Policies that drop tensors and recompute them."""
