"""What goes wrong in a way that a person can mend."""


class LocalError(Exception):
    """The message says what is wrong and what to do; the command ends with exit status 1."""
