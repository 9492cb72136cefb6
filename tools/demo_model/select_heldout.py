"""Choose the held-out documents that ship with the package: a sample of every domain.

Documents are taken in the order of a hash of their id, which is a random order that anybody
can repeat, until a domain is full. Two rules go with it. The two Bibles give the same chapters,
so that they can be compared. Python files with a copyright notice of their own are left out:
what remains is covered by the licence of Python itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from tokenizer import read_documents

DOMAIN_BYTES = 64_000
DOCUMENT_BYTES = 16_000
TRANSLATIONS = ("kjv", "rv1909")


def size(document: dict[str, str]) -> int:
    """Return the bytes of the text."""
    return len(document["text"].encode())


def shippable(document: dict[str, str]) -> bool:
    """Tell whether a document is short enough and needs no notice of its own."""
    own_notice = document["domain"] == "python" and "copyright" in document["text"].lower()
    return size(document) <= DOCUMENT_BYTES and not own_notice


def select(documents: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the chosen documents, domain by domain in the order of first appearance."""
    domains: dict[str, list[dict[str, str]]] = {}
    for each in sorted(documents, key=lambda each: hashlib.sha256(each["id"].encode()).digest()):
        domains.setdefault(each["domain"], []).append(each)
    first, second = TRANSLATIONS
    chosen: list[dict[str, str]] = []
    for domain in dict.fromkeys(each["domain"] for each in documents):
        if domain == second:
            ids = [each["id"] for each in chosen if each["domain"] == first]
            translated = {each["id"]: each for each in domains[second]}
            chosen += [translated[each] for each in ids]
            continue
        room = DOMAIN_BYTES
        for each in filter(shippable, domains[domain]):
            if size(each) <= room:
                room -= size(each)
                chosen.append(each)
    return chosen


def main() -> None:
    """Write the selection and print what it holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heldout", type=Path, required=True, help="heldout.jsonl of corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to write")
    options = parser.parse_args()

    chosen = select(read_documents(options.heldout))
    lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in chosen)
    options.out.write_text(lines, encoding="utf-8")
    for domain in dict.fromkeys(each["domain"] for each in chosen):
        sizes = [size(each) for each in chosen if each["domain"] == domain]
        print(f"{domain:12} {len(sizes):4} documents {sum(sizes):7} bytes")
    print(hashlib.sha256(options.out.read_bytes()).hexdigest(), options.out.name)


if __name__ == "__main__":
    main()
