"""The events of a run: four Arrow tables, and the metrics computed from them."""
