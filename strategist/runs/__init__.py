"""A run folder: what lies in it, which checkpoints are complete, who may write, and who starts and watches the ranks."""
