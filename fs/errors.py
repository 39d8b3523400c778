"""What can go wrong below the FUSE adapter, coarse: the adapter alone turns these into errno values.

The first family is what a program meets (a syscall fails), the second what the user of a command meets.
"""


class FilesystemError(Exception):
    """A syscall fails; the class says how, the message says what."""


class NotFound(FilesystemError):
    """No such name or inode."""


class Exists(FilesystemError):
    """The name is taken."""


class IsDirectory(FilesystemError):
    """A directory where another kind of file is needed."""


class IsNotDirectory(FilesystemError):
    """Another kind of file where a directory is needed."""


class NotEmpty(FilesystemError):
    """The directory has entries."""


class NameTooLong(FilesystemError):
    """More than 255 bytes."""


class Invalid(FilesystemError):
    """An argument makes no sense."""


class NotPermitted(FilesystemError):
    """Forbidden whoever asks."""


class Unsupported(FilesystemError):
    """Not offered; programs fall back."""


class NoAttribute(FilesystemError):
    """No such extended attribute."""


class TooManyLinks(FilesystemError):
    """The inode has as many names as fit."""


class FileTooLarge(FilesystemError):
    """An offset beyond what a live file can hold."""


class NoSpace(FilesystemError):
    """The backing disk, or what of it may be used, is full."""


class ReadOnly(FilesystemError):
    """The mount takes no changes; `status` says why."""


class Damaged(FilesystemError):
    """Bytes that should be here are not."""


class UserError(Exception):
    """A command cannot do what was asked; the message says why and what to do. Nothing was changed."""


class ConfigError(UserError):
    """The configuration file is not understood."""


class StateError(UserError):
    """The state folder is not fit for use: in use, newer, damaged, not one of ours."""
