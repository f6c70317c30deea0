"""Parts of `docs/make_recompute.py`: what is run, how it is measured, and how it is shown."""
