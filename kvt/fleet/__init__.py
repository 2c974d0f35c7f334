"""Train many small models as one: see `kvt.fleet.fleet`."""
