"""The thread that runs every llama.cpp call of a session.

The caller waits interruptibly: on KeyboardInterrupt the running evaluation is told to stop, and
the exception goes on only when llama.cpp has returned, so nothing is freed under its feet.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from bmoe_lab.errors import SessionError

__all__ = ["Worker"]

T = TypeVar("T")

#: Longest time that an interrupt goes unnoticed.
STEP_S = 0.1


class _Job:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None


class Worker:
    """Runs one job at a time on its own thread; callers take turns.

    Parameters
    ----------
    name : str
        Of the thread, as debuggers show it.
    stop : callable
        Called from the waiting thread when it is interrupted; must make the running job end soon.
    """

    def __init__(self, name: str, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.done.is_set():
                continue  # queued twice by an interrupt that came at the wrong moment
            try:
                job.value = job.work()
            except BaseException as error:  # handed to the caller, which raises it
                job.error = error
            finally:
                job.done.set()
            del job

    @property
    def is_current(self) -> bool:
        """Whether the caller is this worker's own thread."""
        return threading.current_thread() is self._thread

    def call(self, work: Callable[[], T], *, before: Callable[[], None] | None = None) -> T:
        """Run `work` on the thread and return its result or raise its exception.

        `before` is called first, in the calling thread, when it is this caller's turn.

        Raises
        ------
        SessionError
            If the worker is closed, or `call` is used from inside a job.
        KeyboardInterrupt
            After the job has ended, if the waiting was interrupted.
        """
        if self.is_current:
            raise SessionError(
                "a session must not be used from inside its own run; got a call from a policy "
                "or an observer. Use a second session."
            )
        with self._turn:
            if self._closed:
                raise SessionError("session must be open; got a closed one. Open a new Session.")
            if before is not None:
                before()
            job = _Job(work)
            interrupted = self._finish(job)
        if interrupted is not None:
            raise interrupted
        if job.error is not None:
            raise job.error
        value: T = job.value
        return value

    def _finish(self, job: _Job) -> KeyboardInterrupt | None:
        """Queue the job and wait for its end, however often the waiting is interrupted."""
        interrupted: KeyboardInterrupt | None = None
        queued = False
        while True:
            try:
                # Inside the try, as the next interrupt may come at any moment.
                if interrupted is not None:
                    self._stop()
                if not queued:
                    self._jobs.put(job)
                    queued = True
                # In steps: a signal that the kernel gives to another thread does not end a wait,
                # and Python runs its handler only when this thread runs again.
                while not job.done.wait(STEP_S):
                    pass
            except KeyboardInterrupt as error:
                interrupted = error
                continue
            return interrupted

    def close(self, work: Callable[[], None]) -> None:
        """Run `work` as the last job and end the thread; a second call does nothing."""
        if self.is_current:
            raise SessionError("a session must not be closed from inside its own run.")
        with self._turn:
            if self._closed:
                return
            self._closed = True
            job = _Job(work)
            interrupted = self._finish(job)
            self._jobs.put(None)
            self._thread.join()
        if job.error is not None:
            raise job.error
        if interrupted is not None:
            raise interrupted
