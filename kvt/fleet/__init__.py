"""Many small trainings as one: see `kvt.fleet.fleet.Fleet`."""
