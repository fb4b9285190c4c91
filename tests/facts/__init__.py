"""Tests of strategist/facts."""
