"""Imported last by the server that ranks fork from: what was imported before is never looked through for garbage again.

A rank that compiles looks through everything it has some hundred times, and most of what it has are torch's and transformers' modules.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
