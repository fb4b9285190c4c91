"""Stands for torchaudio, whose builds do not load beside torch for CPUs; LLaMA-Factory imports it and uses it for sound alone."""
