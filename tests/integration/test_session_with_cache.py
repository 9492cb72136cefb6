"""Session.with_cache: the same model beside itself, with another cache."""

from __future__ import annotations

import pytest

import bmoe_lab as bl
from bmoe_lab.errors import SessionError, SettingsError
from tests.integration.session_tools import open_demo, witness


@pytest.fixture(scope="module")
def session():
    with open_demo() as opened:
        yield opened


def test_with_cache_keeps_every_other_setting_and_the_logits(session):
    with session.with_cache(bl.residency.LFU("2 MiB")) as other:
        assert repr(other.residency_policy) == "LFU(budget='2 MiB')"
        assert other.cache_budget_bytes == 2 * 2**20
        assert (other.n_ctx, other.n_vocab) == (session.n_ctx, session.n_vocab)
        mine, theirs = session.score("a b " * 20).trace, other.score("a b " * 20).trace
        resolved = mine.attrs["session_settings"], theirs.attrs["session_settings"]
        assert '"n_ubatch": 16' in resolved[0]
        assert '"n_ubatch": 16' in resolved[1]
        assert witness(other) == witness(session)


def test_with_cache_leaves_the_first_session_as_it_was(session):
    before = repr(session.residency_policy)
    session.with_cache("1.5 MiB").close()
    assert repr(session.residency_policy) == before
    assert witness(session) == witness(session)


def test_with_cache_residency_policy_is_a_copy(session):
    session.residency_policy.budget = 1
    assert session.residency_policy.budget == session.cache_budget_bytes


def test_with_cache_refuses_a_policy_of_the_future(session):
    with pytest.raises(SettingsError, match="online residency policy"):
        session.with_cache(bl.residency.Belady("2 MiB"))


def test_with_cache_of_a_closed_session_is_refused():
    session = open_demo()
    session.close()
    with pytest.raises(SessionError, match="closed"):
        session.with_cache("2 MiB")
