"""Readers of Hugging Face config.json files, one module per architecture family."""
