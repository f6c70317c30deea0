"""Policies that decide when and where the model's state is updated."""
