"""strategist: the query optimiser of distributed training.

>>> from strategist import recommend
>>> plan = recommend("llama-3.1-8b", "dgx-h100:4", seq_len=8192, global_batch=1024)
"""

__version__ = "0.1.0"
