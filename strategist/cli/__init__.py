"""The command line: the only place that prints, reads arguments, writes files and exits."""
