"""Which layouts exist: one column per choice, one row per candidate."""
