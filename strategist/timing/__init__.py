"""Seconds of a candidate, term by term."""
