"""One kind of error for everything a user can put right; the command line prints it in one line and exits with 2."""


class InputError(Exception):
    """Bad input. The message is one line: which file, which place in it, the value found, and what would be right."""


def first_line(error: BaseException) -> str:
    """What another library said, cut to its first line so that it can stand inside an `InputError`."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
