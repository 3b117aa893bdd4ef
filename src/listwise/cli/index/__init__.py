"""`listwise index`: build, change, tune and check an index of photos."""

from listwise.cli.help import Program
from listwise.cli.index import build, changes, duplicates, entries, manage, marks, upgrade

app = Program(
    help="Build an index of photos, add photos to it or remove them.",
    no_args_is_help=True,
    epilog="""Examples:
  listwise index build shop photos
  listwise index add shop more-photos
  listwise index info shop
""",
)
app.command(epilog=build.BUILD)(build.build)
app.command(epilog=build.ADD)(build.add)
app.command("list", epilog=entries.LIST)(entries.list_entries)
app.command(epilog=entries.REMOVE)(entries.remove)
app.command(epilog=duplicates.EXAMPLES)(duplicates.duplicates)
app.command(epilog=upgrade.UPGRADE)(upgrade.upgrade)
app.command(epilog=changes.EXAMPLES)(changes.changes)
app.command(epilog=upgrade.ROLLBACK)(upgrade.rollback)
app.command(epilog=upgrade.DISCARD)(upgrade.discard)
app.command(epilog=marks.EXAMPLES)(marks.marks)
app.command(epilog=manage.LOCAL)(manage.local)
app.command(epilog=manage.TUNE)(manage.tune)
app.command(epilog=manage.INFO)(manage.info)
app.command(epilog=manage.CHECK)(manage.check)
