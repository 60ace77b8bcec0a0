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

    Until `says` tells what is done first, there is nothing to save, and the process leaves at once with exit code `STOPPED`. A
    SIGINT after any of them kills it at once. If a launcher started the process, the launcher's end counts as a SIGTERM, because
    `accelerate launch` does not forward signals.

    Args:
        in_notebook: where any of these would end the process, raise KeyboardInterrupt instead: a kernel outlives its runs.
    """

    def __init__(self, in_notebook: bool = False):
        self.received, self.says, self.in_notebook = None, None, in_notebook
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
        self.received = self.received or signal.Signals(number).name
        if self.in_notebook and (again or self.says is None):
            raise KeyboardInterrupt
        if again:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        done = f"{self.says}; Ctrl-C leaves at once" if self.says else "nothing to save yet"
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"\n{self.received}: {done}\n".encode())  # print might be at work just now
        if self.says is None:
            os._exit(STOPPED)
