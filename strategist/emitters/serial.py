"""Documents as text, by serialisers: no file of a framework is put together from pieces of text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def json_text(document: Mapping[str, Any]) -> str:
    """Indented JSON in the order of the document, with a final line break."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def yaml_text(document: Mapping[str, Any], comments: tuple[str, ...]) -> str:
    """Block YAML in the order of the document below comment lines; comments hold no line break.

    Without anchors, which many readers of configurations refuse; texts of several lines stay such.
    """
    import yaml  # home of the other import: strategist/reading.py

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, words: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", words, style="|" if "\n" in words else None)

    Plain.add_representer(str, text)
    body: str = yaml.dump(document, Dumper=Plain, sort_keys=False, default_flow_style=False, allow_unicode=True)
    return "".join(f"# {comment}\n" for comment in comments) + body
