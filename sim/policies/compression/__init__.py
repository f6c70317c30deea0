"""Policies that keep tensors in fewer bytes."""
