"""Claims about hf_vit/system/errors.py: how a script ends."""

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError

from hf_vit.system.errors import UserError, as_user_errors, one_line, run_script


def raising(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(2, "No such file", "a\x1b.png"), "error: [Errno 2] No such file: 'a\\x1b.png'"),
        (ImportError("peft is not installed"), "error: peft is not installed"),
        (UserError("a\x1b[1Ab\u202e"), "error: a\\x1b[1Ab\\u202e"),
    ],
)
def test_an_error_of_the_user_is_one_line_and_exit_code_1(error, line):
    with pytest.raises(SystemExit) as ended:
        run_script(raising(error))
    assert ended.value.code == line  # Python writes a text to stderr, and exits with 1


@pytest.mark.parametrize("error", [ValueError("a"), OSError("a"), SystemExit(75)])
def test_every_other_error_keeps_its_traceback(error):
    with pytest.raises(type(error)) as ended:
        run_script(raising(error))
    assert ended.value is error


@pytest.mark.parametrize(
    "error",
    [ValueError("a"), OSError("a"), StrictDataclassFieldValidationError("hidden_size", TypeError("wanted int"))],
)
def test_what_a_library_says_of_a_checkpoint_of_the_user_is_an_error_of_the_user(error):
    with pytest.raises(UserError) as raised, as_user_errors():
        raise error
    assert str(raised.value) == " ".join(str(error).split())


def test_an_interrupt_is_one_line_and_the_exit_code_of_a_shell(capsys):
    with pytest.raises(SystemExit) as ended:
        run_script(raising(KeyboardInterrupt()))
    assert ended.value.code == 130
    assert capsys.readouterr().err.startswith("stopped; the same command goes on")


def test_the_token_is_not_printed(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert one_line(OSError("401 for hf_secret")) == "401 for ***"
