"""Rewrites of a trace: its ops and tensors change, `origin` says what each stands for, and `values` checks it."""
