"""Recording a run: collected in memory, kept in a journal, saved as a trace.

``Recorder`` is filled during the decode, ``Journal`` keeps it against a kill, ``save_trace`` and
``open_trace`` are the final files, ``recover`` finds what a killed run left behind.
"""

from __future__ import annotations

from bmoe_lab.recording.html import describe_html
from bmoe_lab.recording.journal import Journal
from bmoe_lab.recording.recorder import Recorder
from bmoe_lab.recording.recover import Leftover, find_leftovers, recover
from bmoe_lab.recording.spec import TraceSpec
from bmoe_lab.recording.store import check_writable, open_trace, save_trace
from bmoe_lab.recording.text import display_piece

__all__ = [
    "Journal",
    "Leftover",
    "Recorder",
    "TraceSpec",
    "check_writable",
    "describe_html",
    "display_piece",
    "find_leftovers",
    "open_trace",
    "recover",
    "save_trace",
]
