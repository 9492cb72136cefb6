"""The comment lines above a route trace: the model, its layers, their sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from bmoe_lab.converters.number_text import INT
from bmoe_lab.errors import TraceFormatError

__all__ = ["VERSION_LINE", "Preamble", "key_values", "parse_preamble", "preamble_lines"]

VERSION_LINE = "# route_trace v1"

_KNOWN = ("arch", "n_layer", "n_expert", "n_expert_used")
_TOKEN = re.compile(r"([A-Za-z_][\w/.-]*)=(\S*)")


@dataclass(frozen=True)
class Preamble:
    """What the comment lines of a route trace say.

    Parameters
    ----------
    n_expert, n_expert_used : int
        Experts per layer, experts used per token as the run was made.
    model : str, optional
        Path of the model where it ran.
    arch : str, optional
        Architecture.
    n_layer : int, optional
        Blocks of the model.
    expert_bytes, dense_bytes : dict
        Bytes by block; 0 as ``expert_bytes`` marks a block without streamed experts.
    """

    n_expert: int
    n_expert_used: int
    model: str | None = None
    arch: str | None = None
    n_layer: int | None = None
    expert_bytes: dict[int, int] = field(default_factory=dict)
    dense_bytes: dict[int, int] = field(default_factory=dict)


def key_values(line: str) -> dict[str, str]:
    """Return the ``key=value`` tokens of a comment line; ``model`` may hold blanks.

    What follows the path is found from the right: as many tokens of that form as there are, from
    the first known key on.

    Parameters
    ----------
    line : str
        One comment line.

    Examples
    --------
    >>> key_values("# model=/my models/a b=c.gguf arch=qwen3moe n_expert=128")
    {'model': '/my models/a b=c.gguf', 'arch': 'qwen3moe', 'n_expert': '128'}
    >>> key_values("# n_expert=8 model=/a b.gguf arch=x")
    {'n_expert': '8', 'model': '/a b.gguf', 'arch': 'x'}
    """
    text = line.lstrip("#").strip(" ")
    begin = re.search(r"(?:^|(?<= ))model=", text)
    if begin is None:
        return {m[1]: m[2] for m in map(_TOKEN.fullmatch, text.split()) if m}
    found = {m[1]: m[2] for m in map(_TOKEN.fullmatch, text[: begin.start()].split()) if m}
    words = text[begin.end() :].split(" ")
    behind: list[tuple[str, str]] = []
    seen = set(found)
    while len(words) > len(behind) + 1:  # the path keeps at least one word
        match = _TOKEN.fullmatch(words[len(words) - len(behind) - 1])
        if match is None or match[1] in seen:
            break
        seen.add(match[1])
        behind.append((match[1], match[2]))
    behind.reverse()
    while behind and behind[0][0] not in _KNOWN:
        del behind[0]
    found["model"] = " ".join(words[: len(words) - len(behind)])
    return found | dict(behind)


def parse_preamble(lines: Sequence[str], where: str) -> Preamble:
    """Return what the comment lines say.

    Parameters
    ----------
    lines : sequence of str
        The comment lines, without line ends; the first is that of the version.
    where : str
        The file, for messages.

    Raises
    ------
    TraceFormatError
        If a number is none, is given twice, or one that is needed lacks.
    """
    facts: dict[str, str] = {}
    expert_bytes: dict[int, int] = {}
    dense_bytes: dict[int, int] = {}
    for number, line in enumerate(lines[1:], start=2):
        pairs = key_values(line)
        if "layer" in pairs and "n_expert" not in pairs:
            block = _whole(pairs, "layer", where, number)
            if block in expert_bytes or block in dense_bytes:
                raise TraceFormatError(
                    f"layers must be named once; got layer={block} again in {where!r}, "
                    f"line {number}. The file is damaged."
                )
            for name, sizes in (("expert_bytes", expert_bytes), ("dense_bytes", dense_bytes)):
                if name in pairs:
                    sizes[block] = _whole(pairs, name, where, number)
        elif "n_expert" in pairs or "model" in pairs:
            for name, value in pairs.items():
                if name in facts:
                    raise TraceFormatError(
                        f"{name} must be given once; got {value!r} after {facts[name]!r} in "
                        f"{where!r}, line {number}. Were two files joined?"
                    )
                facts[name] = value
            for name in ("n_layer", "n_expert", "n_expert_used"):
                if name in pairs:
                    _whole(pairs, name, where, number)
    for name in ("n_expert", "n_expert_used"):
        if name not in facts:
            raise TraceFormatError(
                f"comment lines must give {name}; got {sorted(facts)} in {where!r}. "
                "The line of the model is missing."
            )
    n_expert, n_used = int(facts["n_expert"]), int(facts["n_expert_used"])
    if not 1 <= n_used <= n_expert <= 32767:
        raise TraceFormatError(
            "model must have 1 <= n_expert_used <= n_expert <= 32767; "
            f"got {n_used} and {n_expert} in {where!r}. The file is damaged."
        )
    return Preamble(
        n_expert=n_expert,
        n_expert_used=n_used,
        model=facts.get("model"),
        arch=facts.get("arch"),
        n_layer=int(facts["n_layer"]) if "n_layer" in facts else None,
        expert_bytes=expert_bytes,
        dense_bytes=dense_bytes,
    )


def _whole(pairs: dict[str, str], name: str, where: str, number: int) -> int:
    text = pairs[name]
    # Sizes are int64 in a trace; nothing else here comes near that.
    if not INT.fullmatch(text) or not 0 <= int(text) < 2**63:
        raise TraceFormatError(
            f"{name} must be a whole number from 0; got {text!r} in {where!r}, line {number}. "
            "The file is damaged."
        )
    return int(text)


def preamble_lines(preamble: Preamble) -> list[str]:
    r"""Return the comment lines that say this; what is unknown is left out.

    Parameters
    ----------
    preamble : Preamble
        What to say.

    Examples
    --------
    >>> print(*preamble_lines(Preamble(8, 2, arch="tiny", expert_bytes={0: 4096})), sep="\n")
    # route_trace v1
    # arch=tiny n_expert=8 n_expert_used=2
    # layer=0 expert_bytes=4096
    """
    facts = [
        f"{name}={value}"
        for name, value in (
            ("model", preamble.model),
            ("arch", preamble.arch),
            ("n_layer", preamble.n_layer),
            ("n_expert", preamble.n_expert),
            ("n_expert_used", preamble.n_expert_used),
        )
        if value is not None
    ]
    lines = [VERSION_LINE, "# " + " ".join(facts)]
    for block in sorted(preamble.expert_bytes):
        line = f"# layer={block} expert_bytes={preamble.expert_bytes[block]}"
        if block in preamble.dense_bytes:
            line += f" dense_bytes={preamble.dense_bytes[block]}"
        lines.append(line)
    return lines
