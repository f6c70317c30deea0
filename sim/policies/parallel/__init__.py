"""Schemes that spread a trace over several devices."""
