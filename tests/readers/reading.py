"""What a file says to its reader."""

from __future__ import annotations

from pathlib import Path

from strategist.readers import open_source, reader_of
from strategist.readers.foreign import Foreign


def read_file(path: Path, ranks: int) -> Foreign:
    """What the file says for a number of ranks."""
    source = open_source(str(path), "FILE")
    return reader_of(source, "FILE").read(source, ranks)
