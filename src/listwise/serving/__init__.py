"""The HTTP interface and the web page: a thin layer over `listwise.search`."""
