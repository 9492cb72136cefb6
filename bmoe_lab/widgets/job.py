"""Long work of a widget: in a thread, stoppable, shown through traits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import traitlets

from bmoe_lab.errors import SessionError

__all__ = ["Job", "Stopped", "Ticket"]

#: Seconds between two updates of a page: it must not be flooded, and a person reads no faster.
INTERVAL = 0.2


class Stopped(Exception):
    """Raised inside a job's work to end it because a person asked for that."""


class Ticket:
    """What a job's work holds: how it tells of its progress and learns that it should stop.

    Parameters
    ----------
    publish : callable
        Takes a dict of values; called at most five times a second, and once at the end.
    """

    def __init__(self, publish: Callable[[dict[str, Any]], None]) -> None:
        self._publish = publish
        self._pending: dict[str, Any] = {}
        self._last = float("-inf")
        self._stopping = threading.Event()
        self._on_stop: Callable[[], None] | None = None
        self._lock = threading.Lock()

    @property
    def stopping(self) -> bool:
        """Whether the work should end."""
        return self._stopping.is_set()

    def check(self) -> None:
        """Raise :class:`Stopped` if the work should end; call it between steps."""
        if self.stopping:
            raise Stopped

    def tell(self, **values: Any) -> None:
        """Publish `values`; those that come too fast are replaced by later ones, none is lost."""
        self._pending.update(values)
        now = time.monotonic()
        if now - self._last >= INTERVAL:
            self._last = now
            self.flush()

    def flush(self) -> None:
        """Publish what is pending, however recent the last time."""
        if self._pending:
            pending, self._pending = self._pending, {}
            self._publish(pending)

    def while_stoppable(self, stop: Callable[[], None] | None) -> None:
        """Say how what runs now is stopped at once; None once it is over.

        Set it only while the work really holds what `stop` would end: a stop meant for this job
        must not end another one's run.
        """
        with self._lock:
            self._on_stop = stop
            if self.stopping and stop is not None:
                stop()

    def stop(self) -> None:
        """Ask the work to end."""
        with self._lock:
            self._stopping.set()
            if self._on_stop is not None:
                self._on_stop()


class Job(traitlets.HasTraits):
    """One piece of work at a time, in a thread of its own.

    Attributes
    ----------
    state : {"idle", "running", "stopping", "done", "stopped", "failed"}
    error : str
        Why it failed, in the words of the exception; empty otherwise.
    exception : BaseException or None
        The same with its traceback, for those who look from Python.

    Examples
    --------
    >>> job = Job()
    >>> seen = []
    >>> job.start(lambda ticket: ticket.tell(n=3), publish=seen.append)
    >>> job.wait()
    'done'
    >>> seen
    [{'n': 3}]
    """

    state = traitlets.Enum(
        ("idle", "running", "stopping", "done", "stopped", "failed"), default_value="idle"
    )
    error = traitlets.Unicode()
    exception = traitlets.Instance(BaseException, allow_none=True)

    def __init__(self) -> None:
        super().__init__()
        self._thread: threading.Thread | None = None
        self._ticket: Ticket | None = None

    @property
    def running(self) -> bool:
        """Whether the work is under way."""
        return self.state in ("running", "stopping")

    def start(
        self,
        work: Callable[[Ticket], Any],
        *,
        publish: Callable[[dict[str, Any]], None] = lambda values: None,
        then: Callable[[Any], None] = lambda result: None,
    ) -> None:
        """Begin `work`; returns at once.

        Parameters
        ----------
        work : callable
            Takes the :class:`Ticket`, returns the result. It ends early by returning, or by raising
            :class:`Stopped`.
        publish : callable, optional
            Takes what the work tells, in the work's thread.
        then : callable, optional
            Takes the result of work that was neither stopped nor failed.

        Raises
        ------
        SessionError
            If this job still runs.
        """
        if self.running:
            raise SessionError("the job must have ended; got one that runs. Stop it first.")
        ticket = Ticket(publish)
        self._ticket = ticket
        self.error, self.exception = "", None
        self.state = "running"

        def run() -> None:
            try:
                result = work(ticket)
                ticket.flush()
                then(result)
                self.state = "stopped" if ticket.stopping else "done"
            except Stopped:
                ticket.flush()
                self.state = "stopped"
            except BaseException as error:  # shown in the widget: no log would be read
                ticket.flush()
                self.exception = error
                self.error = str(error) or type(error).__name__
                self.state = "failed"

        # A daemon: a kernel that shuts down does not wait for a run of hours.
        self._thread = threading.Thread(target=run, name="bmoe-lab job", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the work to end; does nothing if none runs."""
        if self.state == "running" and self._ticket is not None:
            self.state = "stopping"
            self._ticket.stop()

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the work has ended, at most `timeout` seconds, and return the state."""
        if self._thread is not None:
            self._thread.join(timeout)
        return str(self.state)
