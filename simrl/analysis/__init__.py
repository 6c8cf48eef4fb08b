"""Why a run took as long as it did: GPU-hours, critical path, diagnosis, agreement with a
measurement."""
