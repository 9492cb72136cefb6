"""What a trace is, in a line, and whether it has a hot set, in a sentence."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
import xarray as xr

from bmoe_lab.plots import theme
from bmoe_lab.recording.html import describe_html
from bmoe_lab.schema import Phase
from bmoe_lab.widgets.controls import ROW
from bmoe_lab.widgets.job import Job, Ticket

if TYPE_CHECKING:
    from bmoe_lab.simulation.diagnosis import Diagnosis

__all__ = ["TraceSummary", "summary_html"]

# Slots up to which the verdict is worked out at once; more take seconds.
_AT_ONCE = 500_000


def summary_html(trace: xr.Dataset) -> str:
    """Return what a trace is and what to doubt, in one line of HTML.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> "LOSSY" in summary_html(make_trace(n_token=8, n_layer=2, policy="drop"))
    True
    """
    attrs = trace.attrs
    note = theme.run_note(attrs)
    if note.startswith("lossy"):
        note = "LOSSY" + note.removeprefix("lossy")
    color = "" if note == "lossless" else f" style='color:{theme.VERMILLION}'"
    sizes = [
        f"{trace.sizes[dim]:,} {dim}{'' if trace.sizes[dim] == 1 else 's'}"
        for dim in ("token", "layer")
    ]
    n_expert = attrs.get("n_expert", "unknown number of")
    words = [f"<b>{escape(str(attrs.get('model_name', 'unknown model')))}</b>", *sizes]
    words.append(f"{escape(str(n_expert))} experts each, {trace.sizes['slot']} slots")
    words.append(f"<b{color}>{escape(note)}</b>")
    return f"<div style='line-height:1.5'>{' · '.join(words)}</div>"


class TraceSummary(ipywidgets.VBox):
    """Line about a trace with the verdict of :func:`bmoe_lab.diagnose` below it.

    The verdict is worked out in a thread: at once for a short trace, on a button for a long one.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.

    Attributes
    ----------
    diagnosis : Diagnosis or None
        Once it is known.
    verdict : str
        It, or why there is none, in a sentence; empty at first.
    """

    def __init__(self, trace: xr.Dataset) -> None:
        self._trace = trace
        self.diagnosis: Diagnosis | None = None
        self.verdict = ""
        self._job = Job()
        self._job.observe(self._on_state, "state")
        self._budget = ipywidgets.Text(
            description="memory for experts",
            placeholder="as recorded, or such as 2 GiB",
            tooltip="budget of the cache that the verdict is about",
            continuous_update=False,
            style={"description_width": "initial"},
            layout=ipywidgets.Layout(width="400px"),
        )
        self._button = ipywidgets.Button(
            description="Is there a hot set?",
            tooltip="whether a cache of this size can help: replays the trace",
            layout=ipywidgets.Layout(width="auto"),
        )
        self._button.on_click(lambda _: self.start())
        self._text = ipywidgets.HTML()
        details = (
            f"<details><summary>more about the trace</summary>{describe_html(trace)}</details>"
        )
        super().__init__(
            [
                ipywidgets.HTML(summary_html(trace)),
                ipywidgets.HBox([self._button, self._budget], layout=ROW),
                self._text,
                ipywidgets.HTML(details),
            ]
        )
        if 0 < trace["expert_chosen"].size <= _AT_ONCE:
            self.start()

    def start(self, budget: str | None = None) -> None:
        """Begin to work out the verdict, unless that is under way; returns at once.

        Parameters
        ----------
        budget : str, optional
            Such as ``"2 GiB"``; by default what the box says, else the recorded one.
        """
        if self._job.running:
            return
        if budget is not None:
            self._budget.value = budget
        asked = self._budget.value.strip() or None
        self._job.start(lambda ticket: self._work(ticket, asked), then=self._show)

    def wait(self, timeout: float | None = None) -> str:
        """Wait for the verdict, at most `timeout` seconds; return it."""
        self._job.wait(timeout)
        return self.verdict

    def _work(self, ticket: Ticket, budget: str | None) -> Diagnosis:
        from bmoe_lab.simulation.diagnosis import diagnose

        phase = "decode" if (self._trace["phase"].values == Phase.decode).any() else "all"
        return diagnose(self._trace, budget, phase=phase)  # type: ignore[arg-type]

    def _show(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis
        rows = dict(diagnosis.rows())
        self.verdict = (
            f"{diagnosis.verdict} (cache of {rows['budget']}, {diagnosis.phase}): "
            f"{diagnosis.advice}"
        )
        self._text.value = (
            f"<div role='status' style='line-height:1.5'><b>{escape(diagnosis.verdict)}</b>"
            f"{escape(self.verdict.removeprefix(diagnosis.verdict))}</div>"
            f"<details><summary>the numbers</summary>{diagnosis._repr_html_()}</details>"
        )

    def _on_state(self, change: Any) -> None:
        self._button.disabled = self._job.running
        if change.new == "running":
            self.diagnosis, self.verdict = None, ""
            self._text.value = "<div role='status'>replaying …</div>"
        elif change.new == "failed":
            self.verdict = f"No verdict: {self._job.error}"
            self._text.value = f"<div role='status'>{escape(self.verdict)}</div>"
