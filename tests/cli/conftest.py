from command_line import listwise  # noqa: F401
