"""What goes wrong for a reason the user can act on: one line that says where, found and wanted."""


class ConvertError(Exception):
    """The source, the package or the disk is not as it must be. The message is one line for the user."""
