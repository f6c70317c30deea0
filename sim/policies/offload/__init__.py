"""Policies that move tensors to another tier and back."""
