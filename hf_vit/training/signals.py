"""SIGTERM, Ctrl-C and SIGUSR1 while a run trains."""

import ctypes
import os
import signal
import sys

from hf_vit.system.hardware import launched


STOPPED = 75  # exit code after a signal: EX_TEMPFAIL of sysexits.h, "try again later"
ANSWERED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Signals:
    """SIGTERM, SIGINT and SIGUSR1 as requests to the training loop: `received` is the name of the first one, or None.

    Before `training` is True there is nothing to save, and the process leaves at once with exit code `STOPPED`. Once `reporting`
    is, the little that is left is done first. A SIGINT after any of them kills it at once. If a launcher started the process, the launcher's end counts as a SIGTERM, because
    `accelerate launch` does not forward signals.

    Args:
        in_notebook: where any of these would end the process, raise KeyboardInterrupt instead: a kernel outlives its runs.
    """

    def __init__(self, in_notebook: bool = False):
        self.received, self.training, self.reporting, self.in_notebook = None, False, False, in_notebook
        self.before = {number: signal.getsignal(number) for number in (*ANSWERED, signal.SIGCHLD)}
        self.answer(self._receive)
        if launched() and sys.platform == "linux":
            PR_SET_PDEATHSIG = 1
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    @staticmethod
    def answer(handler):
        for number in ANSWERED:
            signal.signal(number, handler)

    def restore(self):
        """Put back the handlers that were there, also that of SIGCHLD, which the data loader takes away."""
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set from Python

    def _receive(self, number, frame):
        again = number == signal.SIGINT and self.received is not None
        if self.in_notebook and (again or not self.training):
            self.received = self.received or signal.Signals(number).name
            raise KeyboardInterrupt
        if again:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self.received = self.received or signal.Signals(number).name
        if self.reporting:
            self._say(f"{self.received}: training is over, and the report is finished first; Ctrl-C leaves at once")
        elif self.training:
            self._say(f"{self.received}: saving after this step; Ctrl-C leaves at once")
        else:
            self._say(f"stopped by {self.received} before the first step")
            os._exit(STOPPED)

    @staticmethod
    def _say(text: str):
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"\n{text}\n".encode())  # print might be at work just now
