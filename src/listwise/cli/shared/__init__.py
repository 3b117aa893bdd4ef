"""What the commands share: the program, options, printing, progress bars and settings as flags."""
