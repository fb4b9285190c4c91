"""Bytes of a candidate, term by term."""
