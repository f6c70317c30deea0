"""Results for people: tables, figures, and timelines that a trace viewer opens."""
