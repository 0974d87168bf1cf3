"""Property tests must not fail because the machine was busy: no deadline, and slow data is fine."""

from hypothesis import HealthCheck, settings

settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("outrider")
