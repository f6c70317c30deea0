"""The commands of `tiersim`, by what they are about: names in, tables out."""
