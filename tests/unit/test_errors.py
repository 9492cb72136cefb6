import inspect

import pytest

from bmoe_lab import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_each_is_in_the_tree(name):
    item = getattr(errors, name)
    if not inspect.isclass(item):
        return
    # An interrupt must not be caught by whoever handles errors.
    roots = errors.BmoeLabError | errors.BmoeLabWarning | KeyboardInterrupt
    assert issubclass(item, roots)


@pytest.mark.parametrize(
    ("name", "standard"),
    [
        ("SchemaError", ValueError),
        ("TraceFileError", OSError),
        ("UnknownNameError", LookupError),
        ("SeamError", RuntimeError),
        ("StreamingError", OSError),
        ("PolicyError", ValueError),
    ],
)
def test_errors_each_is_a_standard_error_too(name, standard):
    assert issubclass(getattr(errors, name), standard)


def test_unknown_name_without_a_close_match_only_lists():
    message = str(errors.unknown_name("policy", "zzz", ["lru", "lfu"]))
    assert message == "policy must be one of ['lfu', 'lru']; got 'zzz'."
