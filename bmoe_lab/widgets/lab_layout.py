"""The controls of a policy lab and how they stand in the page; they do nothing by themselves."""

from __future__ import annotations

from typing import Any

import ipywidgets

from bmoe_lab.widgets.controls import ROW

__all__ = ["LabLayout"]

_WIDE = {"description_width": "initial"}


class LabLayout:
    """Native controls of :class:`bmoe_lab.widgets.PolicyLab`.

    Parameters
    ----------
    text : str
        What stands in the box of the text to score.

    Examples
    --------
    >>> LabLayout("").pin.description
    'Pin'
    """

    def __init__(self, text: str) -> None:
        html = ipywidgets.HTML
        self.residency = ipywidgets.Dropdown(
            options=["lru"],
            description="residency policy",
            tooltip="which experts stay in memory",
            style=_WIDE,
            layout=_width(320),
        )
        self.budget = ipywidgets.SelectionSlider(
            options=[("0 B", 0)],
            description="budget",
            tooltip="bytes of experts that may stay in memory",
            style=_WIDE,
            layout=_width(400),
        )
        self.budget_words = html()
        self.routing = ipywidgets.Dropdown(
            options=[("none", "none")],
            description="routing policy",
            tooltip="which experts run: changes the output",
            style=_WIDE,
            layout=_width(320),
        )
        self.about, self.refusals = html(), html()
        self.parameters = ipywidgets.HBox([], layout=ROW)
        self.message, self.questions, self.numbers = html(), html(), html()
        self.quantity = ipywidgets.Dropdown(
            options=[
                ("misses per token", "misses"),
                ("hit rate", "hit_rate"),
                ("bytes read per token", "bytes"),
            ],
            description="by layer",
            tooltip="what the left figure draws",
            style=_WIDE,
            layout=_width(260),
        )
        self.pin = _button("Pin", "keep this setting as a series")
        self.clear = _button("Clear pinned", "remove all pinned settings")
        self.pinned = ipywidgets.VBox([])
        self.show_code = ipywidgets.ToggleButton(
            value=False, description="Show code", tooltip="Python that makes these numbers again"
        )
        self.code = ipywidgets.Textarea(
            rows=16, layout=ipywidgets.Layout(width="100%", display="none")
        )
        self.prompt = ipywidgets.Text(
            value="In the beginning", description="prompt", style=_WIDE, layout=_width(420)
        )
        self.n_predict = ipywidgets.BoundedIntText(
            value=64, min=1, max=4096, description="tokens", style=_WIDE, layout=_width(140)
        )
        self.record = _button(
            "Record a trace", "run the model losslessly on the prompt, router scores included"
        )
        self.text = ipywidgets.Textarea(
            value=text,
            placeholder="held-out text that the pinned settings are scored on",
            rows=3,
            layout=ipywidgets.Layout(width="100%"),
        )
        self.run = _button(
            "Run live", "score the lossless run and each pinned setting with the model"
        )
        self.stop = _button("Stop", "end the run; what is finished stays")
        self.stop.disabled = True
        self.progress = ipywidgets.IntProgress(layout=_width(240))
        self.live_message, self.live_table = html(), html()

    def rows(self, view: Any, session: bool, text: bool) -> list[Any]:
        """Return the rows of the page.

        Parameters
        ----------
        view : ipywidgets.Widget
            The figure.
        session : bool
            Whether there is a model to record and score with.
        text : bool
            Whether the text to score is typed here.
        """
        rows = []
        if session:
            rows.append(_row(self.prompt, self.n_predict, self.record))
        rows += [
            _row(self.residency, self.budget, self.budget_words),
            _row(self.routing, self.about),
            self.parameters,
            self.refusals,
            self.message,
            self.questions,
            self.numbers,
            view,
            _row(self.pin, self.clear, self.quantity, self.show_code),
            self.pinned,
            self.code,
        ]
        if session:
            rows += [self.text] if text else []
            rows += [_row(self.run, self.stop, self.progress, self.live_message), self.live_table]
        return rows


def _width(pixels: int) -> Any:
    return ipywidgets.Layout(width=f"{pixels}px", max_width="98%")


def _row(*children: Any) -> Any:
    return ipywidgets.HBox(children, layout=ROW)


def _button(text: str, tooltip: str) -> Any:
    return ipywidgets.Button(
        description=text, tooltip=tooltip, layout=ipywidgets.Layout(width="auto")
    )
