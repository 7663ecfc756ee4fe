"""What can go wrong with an entry or with the store itself."""


class StoreError(Exception):
    """Base of everything the store raises; the message is fit for an operator's eyes."""


class InvalidKey(StoreError, ValueError):
    """A key that is not 64 lower-case hex digits. Such a key never reaches the file system."""


class EntryMissing(StoreError):
    """No entry under this key."""


class EntryDamaged(StoreError):
    """An entry is there but must not be used: torn, altered, or not what the model expects."""


class StoreUnavailable(StoreError):
    """The volume refused the operation: full, read-only, gone."""
