"""Two kinds of errors, each one line on the screen: bad input (exit code 2), and a run that stopped
for another reason (exit code 1). Any other exception is a bug and shows its traceback."""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from operator import ne

LONGEST_NAME = 80  # characters of an unknown name that are compared with the known ones
MOST_LISTED = 8  # names that a message lists
LONGEST_WORD, LONGEST_LINE = (
    200,
    2000,
)  # characters of a message; longer words and lines lose their middle


class InputError(Exception):
    """Bad input. The message is one line: the file, the place in it, the value and the remedy.
    `cause` is equal for errors of one kind, which differ in their numbers: by default it is the
    message."""

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(brief(printable(message)))
        self.cause = cause or str(self)

    def _render_traceback_(self) -> list[str]:
        """Return the line alone, which a notebook shows."""
        return [f"{type(self).__name__}: {self}"]


class StoppedError(Exception):
    """A run that ended early for a reason other than its input. The message is one line: the event,
    and what may help."""


def printable(text: str) -> str:
    """Return the text on one line: line ends are spaces; control characters and lone surrogates are
    escaped."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode()
        for c in text
    )


def brief(line: str) -> str:
    """Return a line without the middles of long words, such as values and paths, and if it is still
    long, without its own."""
    words = re.sub(
        rf"\S{{{LONGEST_WORD + 1},}}", lambda word: _without_middle(word[0], LONGEST_WORD), line
    )
    return _without_middle(words, LONGEST_LINE)


def _without_middle(text: str, longest: int) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half + 1 :]}"


def first_line(error: BaseException) -> str:
    """Return the first line of another library's message, for use inside an `InputError`; its
    name if it has none."""
    message = ""
    with suppress(Exception):  # a package's own error may fail to say what it is
        message = str(error).strip()
    return (message or type(error).__name__).splitlines()[0]


def broken(*rules: tuple[object, str]) -> str:
    """Return the words on the first broken rule of pairs (is it broken, words); "" if none is."""
    return next((words for is_broken, words in rules if is_broken), "")


def refuse(
    *rules: tuple[object, str], cause: str = "", error: Callable[[str], Exception] = InputError
) -> None:
    """Raise `InputError` with the words on the first broken rule, if there is one, and the cause of
    all of them; or the `error` that is made of the words, such as the ValueError of a validator."""
    if words := broken(*rules):
        raise InputError(words, cause) if cause else error(words)


def meant(name: object, known: Iterable[str]) -> str:
    """Return " (did you mean areal?)" if a known name is close to an unknown one, else "".

    Close are a similar spelling, all names with one other letter (eq: ep; h220: h200), a known name
    that begins with the unknown one (verl: verl_colocated), and a key that ends with it (gpus:
    cluster.gpus). Case does not matter.
    """
    written = str(name).lower()[:LONGEST_NAME]
    spelt = {part.lower(): key for key in known for part in (key.rpartition(".")[2], key)}
    if written in spelt:
        return f" (did you mean {spelt[written]}?)"
    begun = [name for name in spelt if len(written) > 2 and name.startswith(written)]
    slips = [
        name for name in spelt if len(name) == len(written) > 1 and sum(map(ne, name, written)) == 1
    ]
    similar = [*get_close_matches(written, spelt, n=1), *slips]
    near = list(dict.fromkeys(spelt[name] for name in (begun or similar)[:3]))
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def choose(name: object, known: Iterable[str], lists: str) -> str:
    """Return the names that may replace an unknown one: the known names if they are few, else the
    closest and the command that `lists` all."""
    names = list(known)
    if len(names) <= MOST_LISTED:
        return f"{meant(name, names)}; choose one of {', '.join(names)}"
    closest = ", ".join(get_close_matches(str(name).lower()[:LONGEST_NAME], names, 3, 0.0))
    return f"{meant(name, names) or f' (closest are {closest})'}; {lists} lists all {len(names)}"
