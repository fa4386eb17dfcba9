"""The command line: one file a command, each with add_arguments(parser) and run(args) -> exit code."""
