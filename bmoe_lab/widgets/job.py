"""Long work of a widget: in a thread, stoppable, shown through traits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import traitlets

from bmoe_lab.errors import SessionError

__all__ = ["Job", "Stopped", "Ticket"]

#: Seconds between two updates of a page: it must not be flooded, and a person reads no faster.
INTERVAL = 0.2

#: Who waits for what, by the identity of what is waited for: the first of a queue has it.
_queues: dict[int, deque[Ticket]] = {}
_queues_changed = threading.Condition()


class Stopped(Exception):
    """Raised inside a job's work to end it because a person asked for that."""


class Ticket:
    """What a job's work holds: how it tells of its progress and learns that it should stop.

    Parameters
    ----------
    publish : callable
        Takes a dict of values; called at most five times a second, and once at the end. Not by the
        work's thread: what draws must not slow down what computes.
    clock : callable, optional
        Returns seconds; for tests.

    Attributes
    ----------
    failure : BaseException or None
        What `publish` raised. Nothing is published after it, and the work is asked to stop.
    """

    def __init__(
        self,
        publish: Callable[[dict[str, Any]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: BaseException | None = None
        self._publish = publish
        self._clock = clock
        self._pending: dict[str, Any] = {}
        self._urgent = False
        self._ended = False
        self._last = float("-inf")
        self._changed = threading.Condition()
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
        """Have `values` published, from any thread; returns at once.

        A value that comes too fast is replaced by the next one of its name. The last one of each
        name is always published.
        """
        with self._changed:
            self._pending.update(values)
            self._changed.notify_all()

    def flush(self) -> None:
        """Have what is pending published now, however recent the last time."""
        with self._changed:
            self._urgent = True
            self._changed.notify_all()

    def pump(self) -> float | None:
        """Publish what is pending if it is time.

        Returns
        -------
        float or None
            Seconds until it is time; None if nothing is pending.
        """
        with self._changed:
            if not self._pending:
                self._urgent = False
                return None
            wait = self._last + INTERVAL - self._clock()
            if wait > 0 and not (self._urgent or self._ended):
                return wait
            values, self._pending, self._urgent = self._pending, {}, False
        try:
            self._publish(values)
        finally:
            # Counted from the end: a page that is slow to draw gets its rest too.
            self._last = self._clock()
        return 0.0

    def publish_to_the_end(self) -> None:
        """Publish until :meth:`end` was called; what the publishing thread does."""
        try:
            while True:
                wait = self.pump()
                with self._changed:
                    if wait is None:
                        self._changed.wait_for(lambda: self._pending or self._ended)
                        if not self._pending:
                            return
                    else:
                        self._changed.wait_for(lambda: self._urgent or self._ended, wait)
        except BaseException as error:  # the job fails with it
            self.failure = error
            self.stop()

    def end(self) -> None:
        """Say that nothing more will be told: what is pending is published now."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @contextmanager
    def turn(self, owner: object, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Wait until no other job has `owner`, such as a session, and have it for a while.

        Jobs get it in the order in which they asked. A session makes all its callers take turns,
        but a wait for that cannot be broken off; this one can.

        Parameters
        ----------
        owner : object
            Only its identity counts.
        waiting : callable, optional
            Called if another job has it.

        Raises
        ------
        Stopped
            If the job is stopped while it waits.
        """
        with _queues_changed:
            queue = _queues.setdefault(id(owner), deque())
            queue.append(self)
            first = queue[0] is self
        try:
            if not first:
                waiting()
            with _queues_changed:
                _queues_changed.wait_for(lambda: queue[0] is self or self.stopping)
            self.check()
            yield
        finally:
            with _queues_changed:
                queue.remove(self)
                if not queue:
                    del _queues[id(owner)]
                _queues_changed.notify_all()

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
        with _queues_changed:
            _queues_changed.notify_all()


class Job(traitlets.HasTraits):
    """One piece of work at a time, in a thread of its own.

    Attributes
    ----------
    state : {"idle", "running", "stopping", "done", "stopped", "failed"}
    error : str
        Why it failed, in the words of the exception; empty otherwise.
    exception : BaseException or None
        The same with its traceback, for those who look from Python.

    Notes
    -----
    The traits change in the job's threads, and their observers run there.

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
        # A stop that comes as the work ends must not leave "stopping" behind for good.
        self._lock = threading.RLock()

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
            Takes the :class:`Ticket`, returns the result. It ends early by returning what there is,
            or by raising :class:`Stopped`.
        publish : callable, optional
            Takes what the work tells, in a thread of its own. If it raises, the work is stopped and
            the job has failed.
        then : callable, optional
            Takes what the work returned, stopped or not, after the last `publish`.

        Raises
        ------
        SessionError
            If this job still runs.
        """
        with self._lock:
            if self.running:
                raise SessionError("the job must have ended; got one that runs. Stop it first.")
            self._ticket = ticket = Ticket(publish)
            self.error, self.exception = "", None
            # A daemon: a kernel that shuts down does not wait for a run of hours.
            thread = threading.Thread(
                target=lambda: self._run(ticket, work, then), name="bmoe-lab job", daemon=True
            )
            thread.start()
            self._thread = thread
            # Last, as an observer may raise; the work waits for the lock before it begins.
            self.state = "running"

    def _run(
        self, ticket: Ticket, work: Callable[[Ticket], Any], then: Callable[[Any], None]
    ) -> None:
        with self._lock:
            pass  # until :meth:`start` has said that the job runs
        publisher = threading.Thread(
            target=ticket.publish_to_the_end, name="bmoe-lab job's page", daemon=True
        )
        publisher.start()
        failure: BaseException | None = None
        returned = False
        result = None
        try:
            ticket.check()
            result = work(ticket)
            returned = True
        except Stopped:
            pass
        except BaseException as error:  # shown in the widget: no log would be read
            failure = error
        finally:
            ticket.end()
            publisher.join()
        # What could not be shown ended the work: it comes first.
        failure = ticket.failure or failure
        try:
            if failure is None and returned:
                then(result)
            self._end("failed" if failure else "stopped" if ticket.stopping else "done", failure)
        except BaseException as error:  # of `then`, or of who observes the state
            self._end("failed", error)

    def _end(self, state: str, failure: BaseException | None) -> None:
        with self._lock:
            if failure is not None:
                self.exception = failure
                self.error = str(failure) or type(failure).__name__
            self.state = state

    def stop(self) -> None:
        """Ask the work to end; does nothing if none runs."""
        with self._lock:
            if self.state != "running" or self._ticket is None:
                return
            try:
                self.state = "stopping"
            finally:
                self._ticket.stop()

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the work has ended, at most `timeout` seconds, and return the state."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        return str(self.state)
