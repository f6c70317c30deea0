"""What docs/parallel.md is made of."""
