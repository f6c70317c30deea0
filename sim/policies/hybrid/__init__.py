"""Policies that choose between recomputing and moving."""
