"""How a script ends on an error: what the user gave, and what the machine refuses, get a line; a bug keeps its traceback."""

import contextlib
import sys
from collections.abc import Callable

from hf_vit.system.text import printable, printable_lines


class UserError(ValueError):
    """What the user gave cannot be used; the message says what to do."""


def is_users(error: BaseException) -> bool:
    """Whether the message alone says what to do: a `UserError`, a missing package, or what the system says of a disk or network."""
    return isinstance(error, UserError | ImportError) or (isinstance(error, OSError) and error.errno is not None)


@contextlib.contextmanager
def as_user_errors():
    """What libraries, the model among them, say of a checkpoint or value that the user named, as a `UserError`."""
    from huggingface_hub.errors import StrictDataclassError  # of a field of a config.json

    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError, ImportError, StrictDataclassError) as error:
        raise UserError(" ".join(str(error).split())) from error


def one_line(error: BaseException | str) -> str:
    """The message as one printable line without the Hub token; the name of the error if it has no message. A `UserError` keeps
    its lines."""
    from huggingface_hub import get_token  # takes half a second, and flags are answered before

    text, token = str(error) or type(error).__name__, get_token()
    text = text.replace(token, "***") if token else text
    return printable_lines(text) if isinstance(error, UserError) else printable(" ".join(text.split()))


def run_script(main: Callable[[], None]):
    """Call `main`, and end the process with exit code 1 and the line `error: ...` if the error `is_users`, and with 130, as a
    shell does, on Ctrl-C."""
    try:
        main()
    except Exception as error:
        if not is_users(error):
            raise
        sys.exit(f"error: {one_line(error)}")
    except KeyboardInterrupt:
        print("stopped; the same command goes on, or begins anew if it had kept nothing", file=sys.stderr)
        sys.exit(130)
