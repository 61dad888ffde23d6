"""Plug-ins for other tools, one file per tool. Each file is imported only if it is used."""
