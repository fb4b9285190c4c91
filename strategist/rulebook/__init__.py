"""Rules as data: their words, their expressions, which of them fire."""
