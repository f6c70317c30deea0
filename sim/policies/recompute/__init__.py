"""Policies that drop activations and compute them again."""
