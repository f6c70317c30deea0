"""Parts of `scripts/make_recompute.py`: what is run, how it is measured, and how it is shown."""
