"""Class names of any script in pictures: fonts of this machine that have their characters."""

import functools

from matplotlib import rcParams
from matplotlib.font_manager import FontProperties, findfont, findSystemFonts, fontManager, get_font
from transformers.utils import logging


logger = logging.get_logger(__name__)

_unwritable: set[str] = set()  # characters that no font of this machine has


def legible_names(names: list[str]) -> list[str]:
    """Class names as matplotlib can draw them: one with a character that no font of this machine has is "class N", N its
    index, and a warning says so once."""
    missing = use_fonts_for("".join(names))
    if not missing:
        return names
    logger.warning_once(
        "no font of this machine has all characters of the class names: pictures show numbers instead, such as class 0; install "
        "a font that has them, such as Noto Sans CJK for Chinese, Japanese and Korean"
    )
    return [f"class {index}" if missing.intersection(name) else name for index, name in enumerate(names)]


def legible_text(text: str) -> str:
    """A text as matplotlib can draw it: characters that no font of this machine has are escapes such as \\u732b."""
    missing = use_fonts_for(text)
    return "".join(ascii(sign)[1:-1] if sign in missing else sign for sign in text)


def use_fonts_for(text: str) -> set[str]:
    """Add installed fonts to matplotlib's `font.family`, as its fallback, until they have all characters of a text; those
    that none has.

    The files are looked at themselves: matplotlib's list of fonts is of the day when it was first used.
    """
    missing = {sign for sign in text if not sign.isspace() and ord(sign) not in _characters(*rcParams["font.family"])}
    while sought := missing - _unwritable:
        found = []
        for file in sorted(findSystemFonts()):
            try:
                font = get_font(file)
            except (OSError, RuntimeError):  # a damaged file, or a format that FreeType does not know
                continue
            covered = sought & {chr(code) for code in font.get_charmap()} if font.scalable else set()
            found.append((len(covered), font.style_name == "Regular", font.family_name, file, covered))
        most, _, family, file, covered = max(found, default=(0, False, "", "", set()))
        if most == 0:
            _unwritable.update(sought)
            break
        fontManager.addfont(file)
        rcParams["font.family"] = [*rcParams["font.family"], family]
        missing -= covered
    return missing


@functools.cache
def _characters(*families: str) -> set[int]:
    """The code points that these fonts have together."""
    return {code for family in families for code in get_font(findfont(FontProperties(family=[family]))).get_charmap()}
