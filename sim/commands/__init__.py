"""The commands of `tiersim`, by subject: names in, tables out."""
