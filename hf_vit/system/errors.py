"""How a script ends on an error: bad input, files and missing packages get one line, a bug keeps its traceback."""

import sys
from collections.abc import Callable

from huggingface_hub import get_token
from huggingface_hub.errors import StrictDataclassError

from hf_vit.system.escapes import printable, printable_lines


class UserError(ValueError):
    """What the user gave cannot be used; the message says what to do."""


# Errors whose message says what to do, so that a traceback would only hide it. OSError covers files and the network,
# FloatingPointError a run that diverged, StrictDataclassError a field of a config.json with a wrong value.
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError, StrictDataclassError)


def one_line(error: BaseException | str) -> str:
    """The message as one printable line without the Hub token; the name of the error if it has no message. A `UserError` keeps
    its lines."""
    text, token = str(error) or type(error).__name__, get_token()
    text = text.replace(token, "***") if token else text
    return printable_lines(text) if isinstance(error, UserError) else printable(" ".join(text.split()))


def run_script(main: Callable[[], None]):
    """Call `main`, and end the process with exit code 1 and the line `error: ...` on one of the `USER_ERRORS`, and with 130, as
    a shell does, on Ctrl-C."""
    try:
        main()
    except USER_ERRORS as error:
        sys.exit(f"error: {one_line(error)}")
    except KeyboardInterrupt:
        print("stopped; the same command goes on, or begins anew if it had kept nothing", file=sys.stderr)
        sys.exit(130)
