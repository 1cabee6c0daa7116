"""Settings of the whole test suite."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine is no failure, and a test run leaves nothing in the tree.
settings.register_profile("house", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")
