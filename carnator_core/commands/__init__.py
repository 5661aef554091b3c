"""The commands of `python -m carnator_core`, one file each; each offers `add_parser(subparsers)`."""
