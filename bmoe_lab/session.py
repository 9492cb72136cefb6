"""A model opened for streaming: generate, score, and everything about the model."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from bmoe_lab.errors import PolicyError, PolicyNeverFiredWarning, SessionError, SettingsError
from bmoe_lab.run import Run
from bmoe_lab.runtime.settings import Settings, boolean, integer, one_of
from bmoe_lab.sizes import format_size

if TYPE_CHECKING:
    from bmoe_lab.residency import ResidencyPolicy
    from bmoe_lab.routing import RoutingPolicy
    from bmoe_lab.runtime.account import RunAccount
    from bmoe_lab.runtime.loops import Observer, Outcome
    from bmoe_lab.runtime.step import Step

__all__ = ["Session"]

RecordLevel = Literal["off", "ids", "scores", "scores16"]
_LEVELS = ("off", "ids", "scores", "scores16")

#: Smallest context of a score: the first token alone says nothing about routing.
DEFAULT_CONTEXT = 16


class Session:
    """A Mixture-of-Experts model, run from disk with a bounded cache of experts.

    Without a lossy policy the logits equal those of plain llama.cpp bit for bit, however the
    experts are fetched.

    Parameters
    ----------
    path : str or Path
        A GGUF file; the first one of a split model.
    cache : int, str or ResidencyPolicy, default "auto"
        Bytes for resident experts (``"4 MiB"``), 0 to switch the cache off, ``"auto"`` to size
        it from free memory, or a residency policy with a budget. A size means LRU.
    n_ctx : int, optional
        Positions of the context; left out, 2048 or what the model was trained for, if less.
    n_ubatch : int, default 512
        Widest evaluation; a prompt is split into pieces of this many tokens.
    n_threads : int, optional
        Compute threads; the physical cores if left out.
    io_lanes : int, default 4
        Reads in flight.
    direct : bool, default True
        Read past the page cache where the file system really does it (:attr:`direct` tells).
    dense : {"mmap", "anon"}, default "mmap"
        Where weights that are not experts live: in llama.cpp's mapping of the file, or read once
        into memory of our own.
    n_expert_used : int, optional
        Overrides the router's width. Lossy, but llama.cpp does the same with this setting.
    overlap : {"off"}, default "off"
        Reading while a layer computes; not available in this version.
    cache_floor : int or str, default "1.5 GiB"
        What ``cache="auto"`` leaves free.
    cache_ceiling : int or str, optional
        What ``cache="auto"`` may take at most.
    poison : int, optional
        For tests: fill memory that holds no resident expert with this byte instead of giving it
        back, so that a wrong read shows.

    Raises
    ------
    ModelFileError
        If the file is missing, damaged, or not a Mixture-of-Experts text model.
    SettingsError
        If a setting has an impossible value.
    SeamError
        If the installed llama.cpp is not the one that the seam was built for.

    Notes
    -----
    All llama.cpp calls run on one thread of the session. Callers on several threads take turns.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> with bl.Session(bl.datasets.demo_model(), cache="4 MiB", n_ctx=256, n_threads=1) as session:
    ...     run = session.generate("In the beginning", n_predict=4)
    >>> run.trace.sizes["token"] - len(run.prompt)
    3
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        cache: int | str | ResidencyPolicy = "auto",
        n_ctx: int | None = None,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        io_lanes: int = 4,
        direct: bool = True,
        dense: Literal["mmap", "anon"] = "mmap",
        n_expert_used: int | None = None,
        overlap: Literal["off"] = "off",
        cache_floor: int | str = "1.5 GiB",
        cache_ceiling: int | str | None = None,
        poison: int | None = None,
    ) -> None:
        settings = Settings.resolve(
            path,
            cache=cache,
            cache_floor=cache_floor,
            cache_ceiling=cache_ceiling,
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            io_lanes=io_lanes,
            direct=direct,
            dense=dense,
            n_expert_used=n_expert_used,
            overlap=overlap,
            poison=poison,
        )
        from bmoe_lab.runtime.live import LiveModel
        from bmoe_lab.seam.worker import Worker

        self._settings = settings
        self._closed = False
        self._last_run: Run | None = None
        self._live: LiveModel | None = None
        self._worker = Worker(f"bmoe-lab {settings.path.name}", self.stop)
        opened: list[LiveModel] = []
        try:
            self._worker.call(lambda: opened.append(LiveModel(settings)))
        except BaseException:
            # An interrupt waits for the end of opening: then there is a model to close.
            self._worker.close(opened[0].close if opened else lambda: None)
            raise
        self._live = opened[0]

    # -- life ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model, its memory, and the threads; a second call does nothing."""
        if self._worker.is_current:
            raise SessionError(
                "session must be closed from outside; got a call from inside its own run. "
                "Call stop() there."
            )
        live, self._live = self._live, None
        if live is not None:
            live.stop()
            self._worker.close(live.close)

    def stop(self) -> None:
        """End the running run soon, from any thread; what it recorded so far is kept."""
        live = self._live
        if live is not None:
            live.stop()

    def with_cache(self, cache: int | str | ResidencyPolicy) -> Self:
        """Return a second session on the same file, with the same settings but this cache.

        Both are open then, and each holds its own cache: close the one that is done. The lossless
        logits of the two are equal bit for bit.

        Parameters
        ----------
        cache : int, str or ResidencyPolicy
            As for :class:`Session`.

        Returns
        -------
        Session

        Raises
        ------
        SettingsError
            If the cache is impossible, such as a policy that needs to know the future.
        SessionError
            If this session is closed.

        Examples
        --------
        >>> import bmoe_lab as bl
        >>> with (
        ...     bl.Session(bl.datasets.demo_model(), cache="2 MiB", n_threads=1) as session,
        ...     session.with_cache(bl.residency.LFU("1 MiB")) as other,
        ... ):
        ...     other.residency_policy, other.n_ctx == session.n_ctx
        (LFU(budget='1 MiB'), True)
        """
        values = {
            field.name: getattr(self._settings, field.name)
            for field in dataclasses.fields(self._settings)
        }
        # The context as it is, whatever the model would be given today.
        values |= {"cache": cache, "n_ctx": self.n_ctx}
        return type(self)(values.pop("path"), **values)

    @property
    def _model(self) -> Any:
        if self._live is None:
            raise SessionError("session must be open; got a closed one. Open a new Session.")
        return self._live

    # -- what the model is ---------------------------------------------------------------------

    @property
    def n_ctx(self) -> int:
        """Positions of the context."""
        return int(self._model.n_ctx)

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return int(self._model.model.n_vocab)

    @property
    def direct(self) -> bool:
        """Whether reads really bypass the page cache."""
        return bool(self._model.streamer.reader.direct)

    @property
    def cache_budget_bytes(self) -> int:
        """Bytes allowed to resident experts."""
        return int(self._model.cache_budget)

    @property
    def residency_policy(self) -> ResidencyPolicy:
        """The cache's policy, a copy with its budget; a budget of 0 keeps nothing."""
        policy: ResidencyPolicy = self._model.residency_policy
        return policy.clone()

    @property
    def token_cycle_bytes(self) -> int:
        """Expert bytes that one token asks for; an LRU cache below it hits nothing."""
        return int(self._model.token_cycle)

    @property
    def last_run(self) -> Run | None:
        """The latest run, also if it was interrupted or failed."""
        return self._last_run

    def tokenize(self, text: str, *, add_special: bool = True) -> np.ndarray:
        """Return the token ids of `text`, int32 of shape (token,)."""
        if not isinstance(text, str):
            raise SettingsError(f"text must be a str; got {type(text).__name__}.")
        model = self._model.model
        return np.asarray(self._worker.call(lambda: model.tokenize(text, add_special=add_special)))

    def check(self, policy: RoutingPolicy | None) -> None:
        """Raise PolicyError if `policy` cannot run here: wrong object, no cache, no scores.

        Parameters
        ----------
        policy : RoutingPolicy or None
            As :meth:`generate` and :meth:`score` take it.
        """
        self._prepared(policy, "ids")

    def info(self) -> dict[str, Any]:
        """Return what the capture found, as plain values.

        Returns
        -------
        dict
            ``model``, ``arch``, ``n_layer`` (expert layers), ``n_expert``, ``n_expert_used``,
            ``expert_bytes`` (per layer), ``expert_bytes_total``, ``dense_bytes_total``,
            ``token_cycle_bytes``, ``cache_budget_bytes``, ``stacks`` (names per layer),
            ``not_editable`` (block to reason), ``direct``, ``released_bytes`` (of llama.cpp's
            mapping, given back).
        """
        live = self._model
        layers = live.graph.layers
        return {
            "model": live.layout.name,
            "path": str(self._settings.path),
            "file_bytes": live.layout.file_bytes,
            "arch": live.layout.arch,
            "n_layer": len(layers),
            "n_expert": max(x.n_expert for x in layers),
            "n_expert_used": int(live.n_used.max()),
            "blocks": [x.block for x in layers],
            "groups": [x.group for x in layers],
            "stacks": [[s.name for s in x.stacks] for x in layers],
            "expert_bytes": live.expert_bytes.tolist(),
            "expert_bytes_total": live.expert_bytes_total,
            "dense_bytes_total": live.layout.file_bytes - live.expert_bytes_total,
            "token_cycle_bytes": live.token_cycle,
            "cache_budget_bytes": live.cache_budget,
            "residency_policy": repr(live.residency_policy),
            "not_editable": {
                x.block: why
                for x in layers
                if (why := live.not_editable.get(x.index, "") or x.why_not_weigh)
            },
            "direct": live.streamer.reader.direct,
            "released_bytes": live.released_bytes,
            "n_ctx_train": live.model.n_ctx_train,
        }

    def __repr__(self) -> str:
        if self._live is None:
            return f"<Session of {self._settings.path.name}, closed>"
        live = self._live
        return (
            f"<Session of {live.layout.name} ({live.layout.arch}), {len(live.graph.layers)} "
            f"expert layers{self._width()}, cache {format_size(live.cache_budget)} of "
            f"{format_size(live.expert_bytes_total)}>"
        )

    def _width(self) -> str:
        """Say so if the router's width is not the model's own."""
        used, own = int(self._model.n_used.max()), self._model.layout.n_expert_used
        return "" if own in (None, used) else f", n_expert_used {used} of the model's {own}"

    def _repr_html_(self) -> str:
        from html import escape

        if self._live is None:
            return f"<b>{escape(repr(self)[1:-1])}</b>"
        live = self._live
        rows = [
            ("model", f"{live.layout.name} ({live.layout.arch})"),
            (
                "experts",
                f"{len(live.graph.layers)} layers, top {int(live.n_used.max())} of "
                f"{max(x.n_expert for x in live.graph.layers)}{self._width()}",
            ),
            ("expert bytes", format_size(live.expert_bytes_total)),
            ("cache", f"{live.residency_policy!r}: {format_size(live.cache_budget)}"),
            ("one token asks for", format_size(live.token_cycle)),
            ("reads", "direct" if live.streamer.reader.direct else "through the page cache"),
        ]
        body = "".join(
            f"<tr><th style='text-align:left'>{escape(a)}</th>"
            f"<td style='text-align:left'>{escape(b)}</td></tr>"
            for a, b in rows
        )
        return (
            f"<div><b>Session</b><table>{body}</table><small>Next: "
            "<code>session.generate(prompt, n_predict=64)</code>, "
            "<code>bl.compare(session, text, policies=[...])</code></small></div>"
        )

    # -- runs ----------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | np.ndarray,
        *,
        n_predict: int = 128,
        policy: RoutingPolicy | None = None,
        record: RecordLevel = "ids",
        record_text: bool = True,
        save: str | os.PathLike[str] | None = None,
        start: Literal["cold", "warm"] = "cold",
        seed: int = 0,
        temperature: float = 0.0,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        stop: str | Iterable[str] = (),
        on_text: Callable[[str], None] | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Run:
        """Return a run that continues `prompt`.

        Parameters
        ----------
        prompt : str or ndarray
            Text, or token ids as int of shape (token,).
        n_predict : int, default 128
            Tokens to generate at most.
        policy : RoutingPolicy, optional
            Left out, the run is lossless.
        record : {"ids", "off", "scores", "scores16"}, default "ids"
            ``"ids"`` records ids, weights, residency and bytes; ``"scores"`` also what the router
            scored; ``"off"`` nothing.
        record_text : bool, default True
            Whether the trace holds token ids and pieces.
        save : str or Path, optional
            Where the trace is written as well (``.nc`` or ``.zarr``).
        start : {"cold", "warm"}, default "cold"
            Whether the cache is emptied first.
        seed : int, default 0
            Of sampling and of random policies; below 2**32 - 1.
        temperature : float, default 0
            0 is greedy; above, llama.cpp's top-k, top-p, min-p, temperature chain draws.
        top_k, top_p, min_p : int, float, float
            Used with a temperature.
        stop : str or iterable of str
            Texts that end the run.
        on_text : callable, optional
            Called with each new piece of text, on the session's thread.
        on_step : callable, optional
            Called with a :class:`~bmoe_lab.runtime.step.Step` after every graph evaluation, on the
            session's thread: how far the run is, its sums so far, what each layer looked up and
            read. :meth:`stop` may be called in it. What it or `on_text` raises ends the run and
            comes out of this call; :attr:`last_run` holds what there is.

        Returns
        -------
        Run

        Raises
        ------
        SessionError
            If the prompt is empty or does not fit the context with `n_predict` more tokens.
        PolicyError
            If the policy does not fit the model, or returned something unusable.
        KeyboardInterrupt
            After the run was ended cleanly; :attr:`last_run` holds what there is.
        """
        from bmoe_lab.runtime import loops
        from bmoe_lab.seam.context import Sampler

        n_predict = integer("n_predict", n_predict, 1, 1 << 24)
        sampling = _sampling(temperature, top_k, top_p, min_p)
        _callable("on_text", on_text)
        _callable("on_step", on_step)
        if not isinstance(stop, Iterable):
            raise SettingsError(f"stop must be a text or several; got {stop!r}.")
        words = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not isinstance(word, str) or not word for word in words):
            raise SettingsError(f"stop must be non-empty texts; got {stop!r}.")
        if any("\ud800" <= letter <= "\udfff" for word in words for letter in word):
            raise SettingsError(f"stop must be valid Unicode; got a lone surrogate in {stop!r}.")
        tokens = self._prompt(prompt, "prompt")
        if len(tokens) + n_predict > self.n_ctx:
            raise SessionError(
                f"prompt and n_predict must fit n_ctx={self.n_ctx}; got {len(tokens)} + "
                f"{n_predict} tokens. Open the session with a larger n_ctx."
            )

        def loop(run: RunAccount, outcome: Outcome) -> None:
            sampler = Sampler(seed=seed, **sampling)
            try:
                loops.generate(
                    self._model,
                    run,
                    tokens,
                    outcome,
                    n_predict=n_predict,
                    sampler=sampler,
                    stop=words,
                    on_text=on_text,
                )
            finally:
                sampler.close()

        asked = {"kind": "generate", "n_predict": n_predict, **sampling, "stop": list(words)}
        return self._run(
            loop,
            asked,
            policy=policy,
            record=record,
            record_text=record_text,
            save=save,
            start=start,
            seed=seed,
            on_step=on_step,
        )

    def score(
        self,
        text: str | np.ndarray | list[str] | list[np.ndarray],
        *,
        policy: RoutingPolicy | None = None,
        n_context: int = DEFAULT_CONTEXT,
        observe: Observer | None = None,
        record: RecordLevel = "ids",
        record_text: bool = True,
        save: str | os.PathLike[str] | None = None,
        start: Literal["cold", "warm"] = "cold",
        seed: int = 0,
        progress: Callable[[int], None] | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Run:
        """Return a run that reads `text` token by token and says how likely each one was.

        One token per evaluation, since in a wide batch a cache-aware policy hardly ever acts.

        Parameters
        ----------
        text : str, ndarray, or list of these
            Each is split into windows that fit the context. A window starts with an empty
            context and, unless ``start="warm"``, an empty cache.
        policy : RoutingPolicy, optional
            On after the context of each window.
        n_context : int, default 16
            Tokens of each window that are evaluated losslessly. Neither they nor the token after
            them, which they predict, are scored.
        observe : callable, optional
            ``observe(window, index, token_id, logits)`` for every scored token, with the float32
            logits of shape (vocabulary,) that predict it (a view, valid during the call), on the
            session's thread.
        record, record_text, save, start, seed
            As in :meth:`generate`.
        progress : callable, optional
            Called with the number of tokens done since its last call.
        on_step : callable, optional
            As in :meth:`generate`.

        Returns
        -------
        Run
            ``logprob`` and ``tokens`` of the scored tokens; ``turn`` in the trace is the window.

        Raises
        ------
        SessionError
            If no window is longer than ``n_context + 1`` tokens.
        PolicyError
            If the policy does not fit the model, or returned something unusable.
        """
        from bmoe_lab.runtime import loops

        _callable("observe", observe)
        _callable("progress", progress)
        _callable("on_step", on_step)
        n_context = integer("n_context", n_context, 1, self.n_ctx)
        windows = self.windows(text, n_context=n_context)

        def loop(run: RunAccount, outcome: Outcome) -> None:
            loops.score(
                self._model,
                run,
                windows,
                outcome,
                n_context=n_context,
                observe=observe,
                on_token=progress,
            )

        asked = {"kind": "score", "n_context": n_context, "n_window": len(windows)}
        return self._run(
            loop,
            asked,
            policy=policy,
            record=record,
            record_text=record_text,
            save=save,
            start=start,
            seed=seed,
            on_step=on_step,
        )

    def windows(
        self,
        text: str | np.ndarray | list[str] | list[np.ndarray],
        *,
        n_context: int = DEFAULT_CONTEXT,
    ) -> list[np.ndarray]:
        """Return the token windows that :meth:`score` would run, int32 of shape (token,) each.

        Every window of a text starts as a text does (with the model's begin token, if it has
        one). A last piece too short to be scored is left out.

        Raises
        ------
        SessionError
            If nothing is long enough to be scored.
        """
        texts = text if isinstance(text, list) else [text]
        windows: list[np.ndarray] = []
        lengths = []
        for item in texts:
            tokens = self._prompt(item, "text")
            lengths.append(len(tokens))
            head = tokens[:0]
            if isinstance(item, str):
                plain = self.tokenize(item, add_special=False)
                head = _before(plain, tokens)
                tokens = plain
            step = self.n_ctx - len(head)
            if step < 1:
                continue
            for begin in range(0, len(tokens), step):
                window = np.concatenate([head, tokens[begin : begin + step]])
                if len(window) > n_context + 1:
                    windows.append(window.astype(np.int32))
        if not windows:
            raise SessionError(
                f"text must be longer than n_context + 1 = {n_context + 1} tokens; got "
                f"{lengths}. Give a longer text or a smaller n_context."
            )
        return windows

    def _prompt(self, prompt: Any, name: str) -> np.ndarray:
        if isinstance(prompt, str):
            tokens = self.tokenize(prompt) if prompt else np.zeros(0, np.int32)
        else:
            try:
                tokens = np.asarray(prompt)
            except ValueError as error:
                raise SettingsError(
                    f"{name} must be text or a row of token ids; got rows of unequal length."
                ) from error
            if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
                raise SettingsError(
                    f"{name} must be text or a row of token ids; got {type(prompt).__name__}."
                )
            bad = (tokens < 0) | (tokens >= self.n_vocab)
            if bad.any():
                raise SettingsError(
                    f"token ids must be in [0, {self.n_vocab}); got {int(tokens[bad][0])}."
                )
        if len(tokens) == 0:
            raise SessionError(f"{name} must not be empty; got nothing. Give at least one word.")
        return tokens.astype(np.int32)

    # -- one run -------------------------------------------------------------------------------

    def _run(
        self,
        loop: Callable[[RunAccount, Outcome], None],
        asked: dict[str, Any],
        *,
        policy: RoutingPolicy | None,
        record: RecordLevel,
        record_text: bool,
        save: str | os.PathLike[str] | None,
        start: str,
        seed: int,
        on_step: Callable[[Step], None] | None = None,
    ) -> Run:
        from bmoe_lab.runtime.recorded_run import RunRequest, execute

        one_of("record", record, _LEVELS)
        one_of("start", start, ("cold", "warm"))
        boolean("record_text", record_text)
        if save is not None and not isinstance(save, str | os.PathLike):
            raise SettingsError(f"save must be a path; got {save!r}.")
        # llama.cpp's seeds have 32 bits, and its largest one means "draw one at random".
        seed = integer("seed", seed, 0, (1 << 32) - 2)
        if save is not None and record == "off":
            raise SettingsError(
                "record must be another level where a trace is saved; got 'off'. Record 'ids', or "
                "leave save out."
            )
        if save is not None:
            from bmoe_lab.recording import check_writable

            check_writable(save)
        live = self._model
        request = RunRequest(
            policy=self._prepared(policy, record),
            record=record,
            record_text=record_text,
            save=None if save is None else os.fspath(save),
            warm=start == "warm",
            seed=seed,
            asked=asked,
            on_step=on_step,
        )

        def keep(run: Run) -> None:
            self._last_run = run

        # What an earlier run was told is forgotten in this caller's turn, before the run begins: a
        # stop that comes later, even before the first evaluation, is meant for this run.
        run = self._worker.call(lambda: execute(live, request, loop, keep), before=live.resume)
        summary = run.summary
        if run.complete and not summary.lossless and not summary.fired:
            # Here, not on the worker: the warning names the caller's line.
            warnings.warn(
                f"{summary.policy} never fired: it looked at {summary.counters.examined} slots "
                "and changed none, so this run equals the lossless one.",
                PolicyNeverFiredWarning,
                stacklevel=3,
            )
        return run

    def _prepared(self, policy: RoutingPolicy | None, record: str) -> RoutingPolicy | None:
        """Return the run's own clone of the policy, refused if it cannot work here."""
        from bmoe_lab.routing.engine import as_policy

        live = self._model
        scores = record in ("scores", "scores16")
        if policy is None:
            why = live.why_not(select=False, weigh=False, scores=scores)
            if why:
                raise PolicyError(f"router scores must be known to be recorded; got {why}.")
            return None
        clone = as_policy(policy)
        facts = live.facts()
        clone.check(facts)
        why = live.why_not(
            select=clone.acts_at("select"), weigh=clone.acts_at("weigh"), scores=scores
        )
        if why:
            raise PolicyError(
                f"{clone!r} must be able to edit every expert layer; got {why}. This model can "
                "be streamed losslessly only."
            )
        return clone


def _before(part: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return what the tokenizer put before `part`; it may have put an end token behind it."""
    for start in range(len(tokens) - len(part) + 1):
        if np.array_equal(tokens[start : start + len(part)], part):
            return tokens[:start]
    return tokens[:0]


def _callable(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise SettingsError(f"{name} must be a function or None; got {value!r}.")


def _sampling(temperature: float, top_k: int, top_p: float, min_p: float) -> dict[str, Any]:
    """Check the sampling settings; ranges so written that NaN is refused."""
    for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise SettingsError(f"{name} must be a number; got {value!r}.")
    if not 0 <= temperature <= 100:
        raise SettingsError(f"temperature must be in [0, 100]; got {temperature!r}.")
    if not 0 < top_p <= 1:
        raise SettingsError(f"top_p must be in (0, 1]; got {top_p!r}.")
    if not 0 <= min_p <= 1:
        raise SettingsError(f"min_p must be in [0, 1]; got {min_p!r}.")
    return {
        "temperature": float(temperature),
        "top_k": integer("top_k", top_k, 0, 1 << 30),
        "top_p": float(top_p),
        "min_p": float(min_p),
    }
