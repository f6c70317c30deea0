"""Policies that offload tensors to another tier and prefetch them."""
