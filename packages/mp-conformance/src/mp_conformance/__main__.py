"""``python -m mp_conformance``."""

from mp_conformance.cli import main

if __name__ == "__main__":  # the processes of the ranks import this module again
    raise SystemExit(main())
