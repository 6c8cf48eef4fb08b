"""Two kinds of errors, each one line on the screen: what the user can put right (exit code 2), and what stopped a run
through nobody's input (exit code 1). Anything else is a bug and shows its traceback."""

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST_NAME = 80  # of what is compared with the known ones


class InputError(Exception):
    """Bad input. The message is one line: which file, which place in it, the value found, and what would be right."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it: the line alone."""
        return [f"{type(self).__name__}: {self}"]


class StoppedError(Exception):
    """A run that ended early through nobody's input. The message is one line: what happened, and what may help."""


def printable(text: str) -> str:
    """The text on one line: line ends are spaces; signs that steer a terminal and halves of characters, of a file or its name,
    stand as Python would write them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode() for c in text)


def first_line(error: BaseException) -> str:
    """What another library said, cut to its first line so that it can stand inside an `InputError`."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def meant(name: object, known: Iterable[str]) -> str:
    """What a message says behind an unknown name: " (did you mean areal?)" if one of the known names is near, else nothing.

    Near is what is spelt alike, what goes on from the name (verl: verl_colocated), and a key whose last part it is (gpus:
    cluster.gpus). Capitals do not count.
    """
    written = str(name).lower()[:LONGEST_NAME]
    spelt = {part.lower(): each for each in known for part in (each.rpartition(".")[2], each)}
    begun = [each for each in spelt if len(written) > 2 and each.startswith(written)]
    near = list(dict.fromkeys(spelt[each] for each in begun[:3] or get_close_matches(written, spelt, n=1)))
    return f" (did you mean {' or '.join(near)}?)" if near else ""
