"""Sources of profiles: one module a source, each gives a `simrl.profile.TableProfile`."""
