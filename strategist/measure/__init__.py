"""Rungs two and three of the ladder: the executor's real program, traced or rehearsed, reported in the Plan's own terms."""
