import shutil
from collections import Counter
from pathlib import Path

import pytest

from bmoe_lab import datasets
from bmoe_lab.errors import DatasetError, UnknownNameError

CARD = Path(datasets.__file__).parent / "data" / "MODEL_CARD.md"


@pytest.fixture
def copied_data(tmp_path, monkeypatch):
    """A copy of the data folder that a test may damage."""
    copy = tmp_path / "data"
    shutil.copytree(datasets._DATA, copy)
    monkeypatch.setattr(datasets, "_DATA", copy)
    return copy


def test_demo_model_returns_an_existing_gguf_file():
    path = datasets.demo_model()

    assert path.read_bytes()[:4] == b"GGUF"


def test_demo_model_checks_the_file_once_per_process(copied_data):
    first = datasets.demo_model()
    first.write_bytes(b"changed since")

    assert datasets.demo_model() == first


def test_demo_model_with_one_changed_byte_is_refused(copied_data):
    path = copied_data / "demo-moe.gguf"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)

    with pytest.raises(DatasetError, match=r"must have SHA-256 [0-9a-f]{64}; got [0-9a-f]{64}"):
        datasets.demo_model()


def test_demo_model_that_was_truncated_is_refused(copied_data):
    path = copied_data / "demo-moe.gguf"
    path.write_bytes(path.read_bytes()[:-4096])

    with pytest.raises(DatasetError, match="damaged or was replaced"):
        datasets.demo_model()


def test_demo_model_that_is_missing_is_reported_with_the_file_name(copied_data):
    (copied_data / "demo-moe.gguf").unlink()

    with pytest.raises(DatasetError, match=r"demo-moe\.gguf must be readable"):
        datasets.demo_model()


def test_heldout_with_altered_text_is_refused(copied_data):
    path = copied_data / "heldout.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("the", "teh", 1), encoding="utf-8")

    with pytest.raises(DatasetError, match=r"heldout\.jsonl must have SHA-256"):
        datasets.heldout()


def test_heldout_holds_enough_text_of_every_domain():
    characters = Counter()
    for document in datasets.heldout():
        characters[document.domain] += len(document.text)

    assert set(characters) == set(datasets.DOMAINS)
    assert min(characters.values()) > 40_000


@pytest.mark.parametrize("domain", datasets.DOMAINS)
def test_heldout_with_domain_returns_only_that_domain(domain):
    actual = datasets.heldout(domain)

    assert actual == [each for each in datasets.heldout() if each.domain == domain]


def test_heldout_ids_are_unique_within_a_domain():
    ids = Counter((each.domain, each.id) for each in datasets.heldout())

    assert ids.most_common(1)[0][1] == 1


def test_heldout_bibles_hold_the_same_chapters_in_the_same_order():
    english, spanish = (datasets.heldout(name) for name in ("kjv", "rv1909"))

    assert [each.id for each in english] == [each.id for each in spanish]


def test_heldout_returns_a_new_list_each_time():
    datasets.heldout("python").clear()

    assert datasets.heldout("python")


def test_heldout_with_misspelt_domain_names_the_close_one():
    with pytest.raises(UnknownNameError, match=r"'shakespeare'\]; got 'shakespear'\. Did you mean"):
        datasets.heldout("shakespear")


def test_heldout_with_unlike_domain_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"must be one of \['jargon', .*got 42\.$"):
        datasets.heldout(42)


def test_document_repr_shows_the_length_and_not_the_text():
    document = datasets.Document("python", "a.py", "secret" * 1000)

    assert repr(document) == "Document(domain='python', id='a.py', 6000 characters)"


@pytest.mark.parametrize("name", sorted(datasets._SHA256))
def test_model_card_states_the_checksum_that_the_code_expects(name):
    assert f"{datasets._SHA256[name]}  {name}" in CARD.read_text(encoding="utf-8")
