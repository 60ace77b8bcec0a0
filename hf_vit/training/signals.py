"""SIGTERM, Ctrl-C and SIGUSR1 while a run trains."""

import ctypes
import os
import signal
import sys

from hf_vit.system.hardware import launched


STOPPED = 75  # exit code after a signal: EX_TEMPFAIL of sysexits.h, "try again later"


class Signals:
    """SIGTERM, SIGINT and SIGUSR1 as requests to the training loop: `asked` is the name of the first one, or None.

    Before `training` is True there is nothing to save, and the process leaves at once with exit code `STOPPED`. A SIGINT
    after any of them kills it at once. If a launcher started the process, the launcher's end counts as a SIGTERM, because
    `accelerate launch` does not forward signals.
    """

    def __init__(self):
        self.asked, self.training = None, False
        self.answer(self._ask)
        if launched() and sys.platform == "linux":
            PR_SET_PDEATHSIG = 1
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    @staticmethod
    def answer(handler):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, handler)

    def _ask(self, number, frame):
        if number == signal.SIGINT and self.asked is not None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self.asked = self.asked or signal.Signals(number).name
        if self.training:
            self._say(f"{self.asked}: saving after this step; Ctrl-C leaves at once")
        else:
            self._say(f"stopped by {self.asked} before the first step")
            os._exit(STOPPED)

    @staticmethod
    def _say(text: str):
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"\n{text}\n".encode())  # print might be at work just now
