"""Results for readers: tables, figures, and timelines for a trace viewer."""
