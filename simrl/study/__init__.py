"""Many runs: comparison, sweep, optimisation, calibration."""
