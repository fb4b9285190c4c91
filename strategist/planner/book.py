"""Which book a plan was judged by: a digest of the rules and facts of this strategist."""

from __future__ import annotations

import hashlib
import os
from functools import cache

from strategist.catalog import FOLDER
from strategist.rulebook.books import rules_folder


@cache
def book_digest(rule_folders: tuple[str, ...] = ()) -> str:
    """`sha256:...` over every rule and every row of the catalogue, in file order."""
    seen = hashlib.sha256()
    for folder, ending in ((rules_folder(), ".toml"), *((f, ".toml") for f in rule_folders), (FOLDER, ".jsonl")):
        for name in sorted(name for name in os.listdir(folder) if name.endswith(ending)):
            with open(os.path.join(folder, name), "rb") as file:
                seen.update(name.encode() + b"\0" + file.read() + b"\0")
    return "sha256:" + seen.hexdigest()
