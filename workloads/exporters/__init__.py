"""Traces and runs for other tools: one file a format, each saying what the format does not carry."""
