"""Algorithms that two or more policies need."""
