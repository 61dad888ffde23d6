"""Plug-ins into other tools, one file per tool. Each is imported only by those who use it."""
