"""Python that makes the numbers of a policy lab again."""

from __future__ import annotations

import inspect
from typing import Any

from bmoe_lab import residency as residency_policies
from bmoe_lab import routing as routing_policies
from bmoe_lab.parameters import Parametrised, is_array
from bmoe_lab.widgets.lab_setting import Setting

__all__ = ["code_of"]

_NUMBERS = """
numbers = {
    name: {
        "hit_rate": float(bl.metrics.hit_rate(run, phase=phase)),
        "read_bytes_per_token": float(bl.metrics.read_bytes_per_token(run, phase=phase)),
        "drop_rate": float(bl.metrics.drop_rate(run, phase=phase)),
        "substitution_rate": float(bl.metrics.substitution_rate(run, phase=phase)),
%s    }
    for name, run in runs.items()
}
"""
_WEIGHTS = (
    '        "weight_discarded_frac": float(bl.metrics.weight_discarded_frac(run, phase=phase)),\n'
)


def code_of(
    settings: dict[str, Setting],
    *,
    baseline: Setting | None,
    phase: str,
    weights: bool = True,
    live: list[Setting] | None = None,
    text: Any = None,
) -> str:
    """Return a text of Python; ``numbers`` holds what the lab shows after it ran.

    Parameters
    ----------
    settings : dict of str to Setting
        By the name of their run.
    baseline : Setting or None
        Of the first one.
    phase : str
        Tokens counted.
    weights : bool, default True
        Whether the trace knows the router's weights.
    live, text : list of Setting and str, optional
        What was scored with the model.

    Examples
    --------
    >>> from bmoe_lab.residency import LRU
    >>> code = code_of({"setting": Setting(LRU(), 4096, None)}, baseline=None, phase="decode")
    >>> "bl.replay(trace, residency=bl.residency.LRU(), budget=4096, start='cold')" in code
    True
    """
    notes: list[str] = []
    lines = ["import bmoe_lab as bl", "", "# trace: the recorded trace, as bl.open_trace gives it"]
    lines += ["runs = {"]
    named = dict(settings)
    if baseline is not None:
        named["lossless baseline"] = baseline
    for name, setting in named.items():
        lines.append(f"    {name!r}: {_replay(setting, notes)},")
    lines += ["}", f"phase = {phase!r}"]
    text_of_code = "\n".join(lines) + "\n" + _NUMBERS.lstrip("\n") % (_WEIGHTS if weights else "")
    if live:
        text_of_code += _live(live, text, notes)
    return "".join(f"# {note}\n" for note in dict.fromkeys(notes)) + text_of_code


def _replay(setting: Setting, notes: list[str]) -> str:
    routing = None if setting.routing is None else _policy(setting.routing, notes)
    if isinstance(setting.residency, str):
        return (
            "trace"
            if routing is None
            else (f"bl.replay(trace, residency='recorded', routing={routing})")
        )
    asked = [f"residency={_policy(setting.residency, notes)}"]
    if routing is not None:
        asked.append(f"routing={routing}")
    return f"bl.replay(trace, {', '.join(asked)}, budget={setting.budget}, start='cold')"


def _policy(policy: Any, notes: list[str]) -> str:
    cls = type(policy)
    home = ""
    for module, prefix in (
        (routing_policies, "bl.routing."),
        (residency_policies, "bl.residency."),
    ):
        if getattr(module, cls.__name__, None) is cls:
            home = prefix
    if not home:
        notes.append(f"{cls.__name__}: your own class")
    params = policy.get_params()
    if any(is_array(value) for value in params.values()):
        given = f"given_{cls.__name__}"
        notes.append(f"{given}: the {cls.__name__} that was passed in policies=")
        plain = {name: value for name, value in params.items() if not is_array(value)}
        return f"{home}{cls.__name__}(**({given}.get_params() | {plain!r}))"
    shown = [
        f"{name}={_policy(value, notes) if isinstance(value, Parametrised) else repr(value)}"
        for name, value in params.items()
        if not (name == "budget" and value is None) and not _is_default(cls, name, value)
    ]
    return f"{home}{cls.__name__}({', '.join(shown)})"


def _is_default(cls: type, name: str, value: Any) -> bool:
    default = inspect.signature(cls).parameters[name].default
    return default is not inspect.Parameter.empty and default == value


def _live(settings: list[Setting], text: Any, notes: list[str]) -> str:
    caches: dict[str, list[Setting]] = {}
    for setting in settings:
        caches.setdefault(setting.cache_label, []).append(setting)
    lines = ["", "# With the model. session: the open session", f"text = {text!r}", "trees = {}"]
    for label, members in caches.items():
        cache = members[0].cache
        assert cache is not None
        policies = [
            _policy(one.routing, notes)
            for one in members
            if one.routing is not None and not one.routing.lossless
        ]
        lines += [
            f"with session.with_cache({_policy(cache, notes)}) as other:",
            f"    trees[{label!r}] = bl.compare(",
            f"        other, text, policies=[{', '.join(policies)}], noise_floor=False,",
            "        progress=False,",
            "    )",
        ]
    return "\n".join(lines) + "\n"
