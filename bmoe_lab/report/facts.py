"""What a page says of a run in words: its marks, its warnings, its settings."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

import xarray as xr

__all__ = ["facts_table", "mark", "note", "warning"]

_FACTS = (
    ("model_name", "model"),
    ("arch", "architecture"),
    ("model_bytes", "model size"),
    ("model_fingerprint", "fingerprint (SHA-256)"),
    ("n_expert", "experts per layer"),
    ("residency_policy", "residency policy"),
    ("cache_budget_bytes", "cache budget"),
    ("cache_start", "cache at the start"),
    ("policy", "routing policy"),
    ("source", "source"),
    ("record", "record level"),
    ("seed", "seed"),
    ("start_time", "started"),
    ("machine", "machine"),
    ("bmoe_lab_version", "bmoe_lab"),
    ("llama_cpp_python_version", "llama-cpp-python"),
    ("llama_cpp_commit", "llama.cpp commit"),
    ("session_settings", "session"),
    ("run_settings", "run"),
)


def mark(name: str, trace: xr.Dataset) -> str:
    """Return the label that says whether a run was lossless, as HTML."""
    # Absent in what was imported: neither claimed to be lossless nor to be lossy.
    word = {1: "lossless", 0: "lossy"}.get(trace.attrs.get("lossless", -1), "policy unknown")
    text = name if name.startswith(word) else f"{word}: {name}"
    if int(trace.attrs.get("counterfactual", 0)):
        text += " (counterfactual)"
    return f'<span class="mark {word.split()[-1]}">{html.escape(text)}</span>'


def warning(text: str) -> str:
    """Return a paragraph that stands out; `text` is plain."""
    return f'<p class="warning">{html.escape(text)}</p>'


def note(text: str) -> str:
    """Return a paragraph that explains; `text` is plain."""
    return f'<p class="note">{html.escape(text)}</p>'


def facts_table(attrs: Mapping[Any, Any]) -> str:
    """Return the settings of a run as an HTML table; what is unknown has no row."""
    rows = [
        f"<tr><th>{label}</th><td>{html.escape(_fact(key, attrs[key]))}</td></tr>"
        for key, label in _FACTS
        if key in attrs
    ]
    return f'<table class="facts"><tbody>{"".join(rows)}</tbody></table>'


def _fact(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        from bmoe_lab.sizes import format_size

        return f"{format_size(int(value))} ({int(value)} bytes)"
    text = str(value)
    if text.startswith("{"):
        try:
            settings = json.loads(text)
        except ValueError:
            return text
        return ", ".join(f"{name} = {item}" for name, item in settings.items())
    return text
