"""The law for every policy."""
