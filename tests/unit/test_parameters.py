"""Parameters that are arrays: shown, compared, copied."""

import numpy as np
import pytest
import xarray as xr

from bmoe_lab.errors import PolicyError
from bmoe_lab.parameters import Parametrised, array_digest


class Table(Parametrised):
    def __init__(self, values, name=None):
        self.values = values
        self.name = name


def test_repr_of_an_array_is_its_shape_and_the_start_of_its_digest():
    values = np.arange(12.0).reshape(3, 4)
    shown = repr(Table(values))
    assert shown == f"Table(values=array(shape=(3, 4), sha256='{array_digest(values)[:8]}'))"
    assert len(repr(Table(np.zeros((48, 128, 128))))) < 80
    assert repr(Table([1, 2])) == "Table(values=[1, 2])"


def test_repr_differs_if_one_number_does():
    one, other = np.zeros(1000), np.zeros(1000)
    other[500] = 1e-300
    assert repr(Table(one)) != repr(Table(other))


def test_digest_does_not_depend_on_the_layout_in_memory():
    values = np.arange(12.0).reshape(3, 4)
    assert array_digest(np.asfortranarray(values)) == array_digest(values)
    assert array_digest(np.repeat(values, 2, axis=1)[:, ::2]) == array_digest(values)


def test_equality_of_arrays_is_by_content():
    values = np.array([1.0, np.nan])
    assert Table(values) == Table(values.copy())
    assert Table(values) != Table(np.array([1.0, 2.0]))
    assert Table(values) != Table(values, name="other")
    assert Table(np.zeros((2, 3))) != Table(np.zeros((3, 2)))
    assert Table(np.zeros(2)) != Table(None)
    assert len({Table(values), Table(values.copy())}) == 1


def test_array_of_xarray_is_compared_and_shown_like_one_of_numpy():
    values = np.array([1.0, 2.0])
    named = xr.DataArray(values, dims="layer")
    assert Table(named) == Table(values)
    assert repr(Table(named)) == repr(Table(values))
    assert Table(named).clone() == Table(named)


def test_clone_has_an_array_of_its_own():
    original = Table(np.zeros(3))
    twin = original.clone()
    original.values[0] = 7
    assert twin.values[0] == 0
    assert original != twin


def test_clone_that_stores_another_array_is_refused_in_a_short_message():
    class Scaled(Parametrised):
        def __init__(self, values):
            self.values = values * 2

    with pytest.raises(PolicyError, match=r"must store 'values' as given; got array\(shape="):
        Scaled(np.ones(5)).clone()
