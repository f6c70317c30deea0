"""Policies that every comparison starts from."""
