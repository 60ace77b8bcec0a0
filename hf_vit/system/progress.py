"""What the main process alone says: warnings, and a progress bar for what may take long."""

import os
import sys

from tqdm import tqdm
from transformers.utils import logging


logger = logging.get_logger(__name__)


def is_main_process() -> bool:
    """Whether this is the only process, or the first of those that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def warn(sentence: str):
    """A sentence in the log, once and not by each process."""
    if is_main_process():
        logger.warning(sentence)


def progress_bar(what: str, unit: str, total: int | None = None, items=None) -> tqdm:
    """A bar on stderr that appears after two seconds and goes away at the end.

    Args:
        total: None if it is not known.
        items: what is iterated over, instead of calls of `update`.
    """
    return tqdm(
        items,
        desc=what,
        unit=f" {unit}",
        total=total,
        delay=2,
        leave=False,
        mininterval=1 if sys.stderr.isatty() else 20,  # in a log file, a line now and then
        disable=not is_main_process(),
    )
