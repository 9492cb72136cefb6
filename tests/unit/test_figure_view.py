import numpy as np
import plotly.graph_objects as go

from bmoe_lab.plots import theme
from bmoe_lab.widgets.figure_view import FigureView


def _figure(values):
    figure = theme.figure(title="t", x_title="x", y_title="y")
    return figure.add_trace(go.Heatmap(z=values))


def test_show_sends_arrays_as_bytes():
    values = np.arange(6.0).reshape(2, 3)
    view = FigureView(_figure(values))
    sent = view.figure["data"][0]["z"]
    assert isinstance(sent["bdata"], bytes)
    assert sent["shape"] == "2, 3"
    np.testing.assert_array_equal(np.frombuffer(sent["bdata"], sent["dtype"]), values.ravel())


def test_show_sends_arrays_of_the_layout_as_bytes_too():
    figure = _figure(np.zeros((2, 2)))
    figure.update_xaxes(tickvals=np.arange(2))
    sent = FigureView(figure).figure["layout"]["xaxis"]["tickvals"]
    assert isinstance(sent["bdata"], bytes)


def test_show_sends_one_message_per_figure():
    view = FigureView(_figure(np.zeros((2, 2))))
    sent = []
    view.send_state = lambda key=None: sent.append(set(key))
    view.show(_figure(np.ones((2, 2))))
    assert len(sent) == 1
    assert sent[0] == {"figure", "version"}


def test_show_keeps_the_view_or_resets_it():
    view = FigureView(_figure(np.zeros((2, 2))))
    kept = view.figure["layout"]["uirevision"]
    view.show(_figure(np.zeros((2, 2))))
    assert view.figure["layout"]["uirevision"] == kept
    view.show(_figure(np.zeros((2, 2))), keep_view=False)
    reset = view.figure["layout"]["uirevision"]
    assert reset != kept
    view.show(_figure(np.zeros((2, 2))))
    assert view.figure["layout"]["uirevision"] == reset


def test_show_leaves_the_given_figure_as_it_was():
    figure = _figure(np.zeros((2, 2)))
    before = figure.to_json()
    FigureView(figure)
    assert figure.to_json() == before


def test_views_share_one_library_of_the_installed_version():
    from plotly.offline import get_plotlyjs_version

    first, second = FigureView(), FigureView()
    assert first.library is second.library
    assert first.library.version == get_plotlyjs_version()
    assert first.library.source.startswith(b"/**")


def test_repr_is_short():
    assert repr(FigureView(_figure(np.zeros((900, 900))))) == "<FigureView: t>"
