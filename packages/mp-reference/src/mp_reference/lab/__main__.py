"""``python -m mp_reference.lab``."""

from mp_reference.lab.cli import entry

if __name__ == "__main__":
    entry()
