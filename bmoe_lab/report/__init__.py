"""Traces and comparisons as one self-contained HTML page.

plotly.js is embedded once, so the page works offline and can be mailed. Everything that comes from
a trace (texts, policy reprs, model names) is escaped.
"""

from __future__ import annotations

from bmoe_lab.report.page import report_html, write_report

__all__ = ["report_html", "write_report"]
