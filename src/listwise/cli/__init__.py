"""The command line: the program to which the commands are added."""

from listwise.cli.help import Program

app = Program(
    name="listwise",
    help="Train image retrieval on average precision, index photos, and search them.",
    epilog="""Examples:
  listwise demo             # train on toy photos and search them, in minutes
  listwise train photos     # a folder of class folders
  listwise index build shop photos --model runs/photos/model
  listwise search shop chair.jpg

See listwise COMMAND --help for the options and examples of a command.
""",
)
