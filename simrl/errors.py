"""Two kinds of errors, each one line on the screen: what the user can put right (exit code 2), and what stopped a run
through nobody's input (exit code 1). Anything else is a bug and shows its traceback."""


class InputError(Exception):
    """Bad input. The message is one line: which file, which place in it, the value found, and what would be right."""


class StoppedError(Exception):
    """A run that ended early through nobody's input. The message is one line: what happened, and what may help."""


def first_line(error: BaseException) -> str:
    """What another library said, cut to its first line so that it can stand inside an `InputError`."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
