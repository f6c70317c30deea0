"""What docs/mt3000.md and its Chinese twin are made from: runs, what follows from them, tables and words."""
