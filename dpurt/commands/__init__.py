"""The subcommands that talk to a node or run one; each module has `add_arguments(parser)` and `run(args) -> int`."""
