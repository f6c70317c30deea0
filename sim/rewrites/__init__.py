"""Rewrites of a trace: ops and tensors change, `origin` says what each one stands for, and `values` checks it."""
