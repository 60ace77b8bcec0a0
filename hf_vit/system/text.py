"""Text of strangers (class names, file names, licences) as nothing but text, a function for each place that it goes to.

YAML has a writer of its own (`yaml.safe_dump`), HTML that of Gradio.
"""

import re
import unicodedata


JOINERS = "\u200c\u200d"  # Persian and emoji are written with them; they move nothing
# A cell that begins so is a formula, https://owasp.org/www-community/attacks/CSV_Injection
FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
LONGEST_LICENSE = 200  # characters


def printable(text: object) -> str:
    """One line for a terminal or a picture: control, bidi and other invisible characters as escapes such as \\x1b."""
    text = str(text)
    if text.isprintable():  # as nearly all are, and a table has thousands: a tenth of the time
        return text
    hidden = lambda sign: unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp") and sign not in JOINERS
    return "".join(ascii(sign)[1:-1] if hidden(sign) else sign for sign in text)


def printable_lines(text: object) -> str:
    """As `printable`, for a text of our own with lines."""
    return "\n".join(map(printable, str(text).split("\n")))


def listed(items, most: int = 5) -> str:
    """The first of them, with commas between them."""
    items = list(items)
    return ", ".join(map(str, items[:most])) + (" ..." if len(items) > most else "")


def counted(count: int, noun: str) -> str:
    """Such as "1 image" and "1,200 images"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def inline(text: object) -> str:
    """Text that is nothing but text within a line or a table of Markdown."""
    # An underscore within a word is only that (CommonMark 0.31, section 6.2).
    escaped = re.sub(r"(^[#>]|[\\`*|\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", printable(" ".join(str(text).split())))
    return escaped.replace("<", "&lt;")


def inline_all(value):
    """`inline` of every text in nested lists and mappings, but for their keys."""
    if isinstance(value, dict):
        return {key: inline_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [inline_all(item) for item in value]
    return inline(value) if isinstance(value, str) else value


def csv_cell(text: str) -> str:
    """Text for a cell of a table; an apostrophe keeps a spreadsheet from running it as a formula."""
    return ("'" if text.startswith(FORMULA) else "") + printable(text)


def csv_text(table, **how) -> str:
    """A pandas table as CSV whose texts, column names among them, are `csv_cell`s."""
    cells = table.map(lambda value: csv_cell(value) if isinstance(value, str) else value)
    return cells.rename(columns=csv_cell).to_csv(index=False, **how)


def as_license(value: object) -> str | None:
    """What a card names as its licence, which YAML may have read as a date or a list, as one line; None for nothing."""
    parts = value if isinstance(value, list) else [value]
    text = ", ".join(" ".join(str(part).split()) for part in parts if part is not None)
    return printable(text)[:LONGEST_LICENSE] or None
