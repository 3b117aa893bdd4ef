"""`listwise index`: photos into an index and out of it."""

import typer

from listwise.cli.index import build, manage

app = typer.Typer(help="Make an index of photos, add to it, remove from it.", no_args_is_help=True)
app.command(epilog=build.BUILD)(build.build)
app.command(epilog=build.ADD)(build.add)
app.command(epilog=manage.REMOVE)(manage.remove)
app.command(epilog=manage.TUNE)(manage.tune)
app.command(epilog=manage.INFO)(manage.info)
